"""ERNIE 4.5 (text): neighbouring pairs are rotated; dense, and with experts."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=((r"\.mlp\.moe_statics\.", ".mlp.gate."),),
    # Layers that predict several tokens.
    skipped=r"model\.mtp_",
)


@family("Ernie4_5ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    config = config.completed(num_key_value_heads=2)
    return decoder_spec(config, **_shared(config, config.count("head_dim", 128)))


@family("Ernie4_5_MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """A learned correction takes part in the choice, though scores are a softmax."""
    num_layers, last = config.count("num_hidden_layers"), config.integer("moe_layer_end_index", -1)
    first, every = config.integer("moe_layer_start_index", 1), config.count("moe_layer_interval", 1)
    last = num_layers - 1 if last == -1 else last
    size = config.count("moe_intermediate_size")
    experts = ExpertSpec(
        num_experts=config.count("moe_num_experts", 64),
        num_active=config.count("moe_k", 6),
        intermediate_size=size,
        layers=tuple(
            layer for layer in range(num_layers) if first <= layer <= last and not (layer + 1) % every
        ),
        correction_bias=True,
        shared_intermediate_size=size * config.integer("moe_num_shared_experts", 2),
    )
    fields = _shared(config, head_size(config))
    return decoder_spec(config, **fields, head_bias=fields["mlp_bias"], experts=experts, names=_NAMES)


def _shared(config: ConfigReader, head_dim: int) -> dict[str, Any]:
    bias = config.flag("use_bias", False)
    rope = config.rope(head_dim, default_theta=500_000.0)
    return {
        "head_dim": head_dim,
        "ropes": (msgspec.structs.replace(rope, interleaved=True),),
        "default_eps": 1e-5,
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }
