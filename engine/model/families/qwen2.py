"""Qwen2 and Qwen2.5, and MiMo: biases on q, k and v; optional sliding windows in the upper layers; dense, and
with experts beside a shared one that has a gate.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, windows_of
from engine.model.layer_spec import PredictionSpec, prediction_names
from engine.model.spec import ExpertSpec, ModelSpec, TensorNames

_NAMES = TensorNames(renamed=((r"\.mlp\.shared_expert(?=\.|_gate\.)", ".mlp.shared_experts"),))


@family("Qwen2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Qwen2 and Qwen2.5."""
    return decoder_spec(config, qkv_bias=True, windows=upper_windows(config))


@family("MiMoForCausalLM")
def read_mimo(config: ConfigReader) -> ModelSpec:
    """MiMo-7B: Qwen2 with layers that predict further tokens."""
    own = r"model\.mtp_layers\.0\."
    return msgspec.structs.replace(
        read(config),
        names=TensorNames(skipped=r"model\.mtp_layers\."),
        prediction=PredictionSpec(
            target_size=config.count("hidden_size"),
            own=own,
            renamed=prediction_names(own),
            hidden_first=True,
        ),
    )


@family("Qwen2MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """Experts in all layers, in every so many, or in all but some."""
    experts = ExpertSpec(
        num_experts=config.count("num_experts", 60),
        num_active=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=sparse_layers(config),
        normalized=config.flag("norm_topk_prob", False),
        shared_intermediate_size=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return decoder_spec(
        config,
        qkv_bias=config.flag("qkv_bias", True),
        windows=upper_windows(config),
        experts=experts,
        names=_NAMES,
    )


def sparse_layers(config: ConfigReader) -> tuple[int, ...]:
    """Layers with experts: every so many, and none of those that are named."""
    dense = config.numbers_of("mlp_only_layers") or ()
    every = config.count("decoder_sparse_step", 1)
    layers = range(config.count("num_hidden_layers"))
    return tuple(layer for layer in layers if layer not in dense and (layer + 1) % every == 0)


def upper_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """Windows from layer `max_window_layers` upwards, when `use_sliding_window` is set."""
    num_layers = config.count("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = config.integer("max_window_layers", 28)
    window = config.integer("sliding_window", 4096)
    return windows_of(config, default=[layer >= first for layer in range(num_layers)], window=window)
