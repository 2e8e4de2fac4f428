"""RecurrentGemma (Griffin, arXiv 2402.19427): two layers of recurrent units, then one of attention behind a
window, and so on; feed-forwards and norms are Gemma's.
"""

from __future__ import annotations

import struct

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, decoder_spec, family, head_size
from engine.model.spec import CheckpointError, ModelSpec, StateSpec, TensorNames

_PATTERN = ("recurrent", "recurrent", "attention")
_NAMES = (
    (r"\.temporal_block\.([qkvo])_proj\.", r".self_attn.\1_proj."),
    (r"\.temporal_block\.linear_([xy])\.", r".state.\1_proj."),
    (r"\.temporal_block\.linear_out\.", ".state.out_proj."),
    (r"\.temporal_block\.conv_1d\.", ".state.conv1d."),
    (r"\.temporal_block\.rg_lru\.", ".state.rg_lru."),
    (r"\.temporal_pre_norm\.", ".input_layernorm."),
    (r"\.channel_pre_norm\.", ".post_attention_layernorm."),
    (r"\.mlp_block\.", ".mlp."),
    (r"^model\.final_norm\.", "model.norm."),
)
# What the published checkpoints were trained with, which say nothing.
_POSITIONS = 8192


@family("RecurrentGemmaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Every linear layer but those of queries, keys and values has a bias."""
    config.require("embeddings_scale_by_sqrt_dim", True, True)
    config = ConfigReader({"max_position_embeddings": _POSITIONS, **config.values}, config.source)
    num_layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    gate = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    if gate != "gelu_tanh":
        raise CheckpointError(
            f"{config.source}: hidden_activation = {config.values['hidden_activation']!r} is not supported, "
            "only 'gelu_pytorch_tanh'"
        )
    kinds = _kinds(config, num_layers)
    attending, others = (
        tuple(layer for layer, each in enumerate(kinds) if each == kind)
        for kind in ("attention", "recurrent")
    )
    size = config.count("intermediate_size")
    config.require_multiple("intermediate_size", size, "the number of its halves", 2)
    return decoder_spec(
        config,
        intermediate_size=size // 2,
        activation=gate,
        qkv_bias=config.flag("attention_bias", False),
        output_bias=True,
        mlp_bias=True,
        norm_offset=True,
        embedding_scale=_as_bfloat16(hidden**0.5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        logit_soft_cap=config.number("logits_soft_cap", 30.0),
        ropes=(config.rope(head_size(config), default_partial=0.5),),
        windows=(config.count("attention_window_size", 2048),) * num_layers,
        state=_state(config, others, hidden) if others else None,
        attention_layers=attending,
        names=TensorNames(renamed=_NAMES),
    )


def _kinds(config: ConfigReader, num_layers: int) -> list[str]:
    """What each layer is, from a pattern that is repeated."""
    pattern = config.values.get("block_types") or list(_PATTERN)
    if not isinstance(pattern, list) or not set(map(str, pattern)) <= set(_PATTERN):
        raise CheckpointError(
            f"{config.source}: block_types = {pattern!r} does not list 'recurrent' and 'attention'"
        )
    return [str(pattern[layer % len(pattern)]) for layer in range(num_layers)]


def _state(config: ConfigReader, layers: tuple[int, ...], hidden: int) -> StateSpec:
    width, heads = config.count("lru_width", hidden), config.count("num_attention_heads")
    config.require_multiple("lru_width", width, "num_attention_heads", heads)
    return StateSpec(
        kind="rg_lru",
        layers=layers,
        taps=config.count("conv1d_width", 4),
        channels=width,
        num_heads=heads,
        num_groups=heads,
        key_dim=1,
        value_dim=width // heads,
        convolution_bias=True,
        bias=True,
    )


def _as_bfloat16(value: float) -> float:
    """The nearest number of that type, which the factor was trained in."""
    bits = int.from_bytes(struct.pack("<f", value), "little")
    bits = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    found: float = struct.unpack("<f", bits.to_bytes(4, "little"))[0]
    return found
