"""Gemma 1 to 3 (text): norms stored as offsets, scaled embeddings; later ones with norms on both sides, soft
caps and windows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family, windows_of
from engine.model.spec import CheckpointError, ModelSpec, TensorNames


@family("GemmaForCausalLM")
def read_gemma(config: ConfigReader) -> ModelSpec:
    """What the first checkpoints call `gelu` is its approximation, which they were trained with."""
    config.require("use_bidirectional_attention", False, False)
    head_dim = config.count("head_dim", 256)
    stated = config.values.get("hidden_activation") or config.text("hidden_act", "gelu_pytorch_tanh")
    gate = "gelu_pytorch_tanh" if stated == "gelu" else stated
    return decoder_spec(
        config,
        **_shared(config)
        | {
            "attention_scale": head_dim**-0.5,
            "activation": activation(ConfigReader({"hidden_act": gate}, config.source)),
            "norm_placement": "pre",
        },
    )


_BEFORE_ALONE = TensorNames(
    renamed=((r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),),
)


@family("VaultGemmaForCausalLM")
def read_vault(config: ConfigReader) -> ModelSpec:
    """Gemma 2 without norms after the half layers."""
    return msgspec.structs.replace(read_gemma2(config), norm_placement="pre", names=_BEFORE_ALONE)


@family("Gemma2ForCausalLM")
def read_gemma2(config: ConfigReader) -> ModelSpec:
    """Every other layer slides, scores and logits have soft caps."""
    num_layers = config.count("num_hidden_layers")
    windows = windows_of(
        config,
        default=[layer % 2 == 0 for layer in range(num_layers)],
        window=config.integer("sliding_window", 4096),
    )
    return decoder_spec(
        config,
        **_shared(config),
        windows=windows,
        attention_soft_cap=_cap(config, "attn_logit_softcapping", 50.0),
        logit_soft_cap=_cap(config, "final_logit_softcapping", 30.0),
    )


@family("Gemma3ForCausalLM")
def read_gemma3(config: ConfigReader) -> ModelSpec:
    """Five of six layers slide and turn by a base of their own; queries and keys are
    normed.
    """
    config.require("use_bidirectional_attention", False, False)
    # It has the key from Gemma 2, and nobody computes it.
    config.require("attn_logit_softcapping", None, None)
    num_layers = config.count("num_hidden_layers")
    pattern = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
    windows = windows_of(
        config,
        default=[(layer + 1) % pattern != 0 for layer in range(num_layers)],
        window=config.integer("sliding_window", 4096),
    )
    head_dim = config.count("head_dim", 256)
    return decoder_spec(
        config,
        **_shared(config),
        windows=windows,
        ropes=(
            config.rope(head_dim, layer_type="full_attention", default_theta=1_000_000.0),
            local_rope(config, head_dim),
        ),
        rope_of_layer=tuple(0 if window is None else 1 for window in windows),
        qk_norm="head",
        logit_soft_cap=_cap(config, "final_logit_softcapping", None),
    )


def local_rope(config: ConfigReader, head_dim: int) -> Any:
    """Rotation of sliding layers: never scaled, and of base `rope_local_base_freq` in the older form."""
    theta = config.number("rope_local_base_freq", 10_000.0)
    return config.without("rope_theta", "rope_scaling").rope(
        head_dim, layer_type="sliding_attention", default_theta=theta
    )


def _shared(config: ConfigReader) -> dict[str, Any]:
    return {
        **attention_biases(config),
        "head_dim": config.count("head_dim", 256),
        "attention_scale": _scale(config),
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "norm_offset": True,
        "embedding_scale": config.count("hidden_size") ** 0.5,
        "rounds_embedding_scale": True,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
    }


def _scale(config: ConfigReader) -> float:
    """Of scores."""
    width = config.number("query_pre_attn_scalar", 256.0)
    if width <= 0:
        raise CheckpointError(f"{config.source}: query_pre_attn_scalar = {width} is not a number above 0")
    return float(width**-0.5)


def _cap(config: ConfigReader, key: str, default: float | None) -> float | None:
    """A soft cap; an explicit null turns it off."""
    return config.optional_number(key) if key in config.values else default
