"""Flint (Recursive): sinks in all layers, of which those with a window alone rotate; experts by their
sigmoids beside a shared one.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, some_rotate, windows_of
from engine.model.families.qwen2 import sparse_layers
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        (r"\.self_attn\.softmax_offset$", ".self_attn.sinks"),
    )
)


@family("FlintForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """The first two layers, every fourth one and the last look at everything, and the first two have no
    experts, unless stated.
    """
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    slides = [layer > 1 and layer % 4 != 1 and layer + 1 != num_layers for layer in range(num_layers)]
    windows = windows_of(config, default=slides, window=config.count("sliding_window", 513))
    if config.values.get("mlp_only_layers") is None:
        config = ConfigReader({**config.values, "mlp_only_layers": [0, 1]}, config.source)
    sparse = sparse_layers(config)
    experts = ExpertSpec(
        num_experts=config.integer_of("num_experts", "num_local_experts"),
        num_active=config.count("num_experts_per_tok", 6),
        intermediate_size=config.count("moe_intermediate_size", 512),
        layers=sparse,
        scoring="sigmoid",
        normalized=config.flag("norm_topk_prob", True),
        shared_intermediate_size=config.count("shared_expert_intermediate_size", 1024),
    )
    return decoder_spec(
        config,
        head_dim=head_dim,
        **attention_biases(config),
        **some_rotate(config.rope(head_dim), [window is not None for window in windows]),
        windows=windows,
        qk_norm="head",
        attention_sinks=True,
        experts=experts if sparse else None,
        names=_NAMES,
    )
