"""Ling 3: Kimi Delta Attention whose decays have a floor in most layers; latent attention with a gate for
each head in the others; experts in groups.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family, mixed_layers, norm_eps
from engine.model.families.deepseek import (
    corrected_routing,
    listed_sparse,
    prediction,
    read_latent,
    routed_experts,
)
from engine.model.families.kimi_linear import OWN_KEYS, channel_delta, state_names
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

_NAMES = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.mlp\.gate\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


@family("BailingHybridForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Ling-3.0-Flash; layers attend at the end of each group."""
    # What turns is a part by itself, of `qk_rope_head_dim`, whatever share of a head its checkpoints name.
    config = config.aliased(**OWN_KEYS).turning_whole()
    if not config.values.get("rope_parameters"):
        config = ConfigReader({"rope_theta": 6_000_000.0, **config.values}, config.source)
    num_layers, every = config.count("num_hidden_layers"), config.count("layer_group_size", 6)
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    attending, others = mixed_layers(config, default=default, state="linear_attention")
    routing = corrected_routing(config, num_groups=8, num_active_groups=4)
    experts = routed_experts(config, routing, default_dense=2, default_scaling=2.5, default_shared=1)
    behind = prediction(config).get("names", TensorNames())
    # Those that are left are of layers that attend.
    gates = (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj.")
    names = state_names(others, *_NAMES, skipped=behind.skipped)
    return read_latent(
        config,
        listed_sparse(config, experts),
        interleaved=True,
        attention_layers=attending,
        attention_gate="one_per_head",
        state=channel_delta(
            config,
            others,
            num_heads=config.count("linear_num_heads", config.count("num_attention_heads")),
            head_dim=config.count("linear_head_dim", config.count("head_dim", 128)),
            taps=config.count("short_conv_kernel_size", 4),
            decay_floor=_floor(config),
            norm_eps=norm_eps(config),
        ),
        names=msgspec.structs.replace(names, renamed=(*names.renamed, gates)),
        # Nothing says what its attention is.
        prediction=None,
    )


def _floor(config: ConfigReader) -> float:
    """Of decays' exponents; 0 is none."""
    if not config.flag("kda_safe_gate", True):
        return 0.0
    floor = config.number("kda_lower_bound", -5.0)
    if floor >= 0:
        raise CheckpointError(f"{config.source}: kda_lower_bound = {floor} is not below 0")
    return floor
