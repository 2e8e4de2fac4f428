"""StableLM: layer norms, a part of each head is rotated, perhaps both half layers side by side."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, layer_norms
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(renamed=((r"\.(q|k)_layernorm\.norms\.", r".\1_norm.norms."),))


@family("StableLmForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Larger ones norm queries and keys, each head by weights of its own."""
    config = config.aliased(partial_rotary_factor="rope_pct")
    is_parallel = config.flag("use_parallel_residual", False)
    return decoder_spec(
        config,
        **layer_norms(config),
        ropes=(config.rope(head_size(config), default_partial=0.25),),
        qkv_bias=config.flag("use_qkv_bias", False),
        qk_norm="each" if config.flag("qk_layernorm", False) else "none",
        norm_placement="parallel_shared" if is_parallel else "pre",
        names=_NAMES,
    )
