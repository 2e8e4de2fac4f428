"""Zamba2: Mamba 2 in every layer, in front of which some layers use a block of attention and feed-forward
that they share, each with low-rank products of its own.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2_of
from engine.model.families.base import activation, decoder_spec, family, unturned
from engine.model.layer_spec import SharedBlockSpec
from engine.model.spec import CheckpointError, ModelSpec, StateSpec, TensorNames

_KINDS = {"mamba": False, "linear_attention": False, "hybrid": True}


@family("Zamba2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Zamba2-1.2B, 2.7B and 7B. Norms of states have an eps of their own, and convolutions biases always."""
    config.require("use_long_context", False, False)
    # Without it transformers shares no blocks either.
    config.require("tie_word_embeddings", True, True)
    kinds = _kinds(config)
    uses = tuple(layer for layer, each in enumerate(kinds) if each)
    hidden, num_heads = config.count("hidden_size"), config.count("num_attention_heads")
    config.require_multiple("2 * hidden_size", 2 * hidden, "num_attention_heads", num_heads)
    head_dim = 2 * hidden // num_heads
    rope, num_blocks = config.rope(head_dim), config.count("num_mem_blocks", 1)
    return decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_dim,
        intermediate_size=config.count("intermediate_size", 4 * hidden),
        activation=activation(config, default="gelu"),
        attention_scale=(head_dim / 2) ** -0.5,
        mlp_bias=config.flag("add_bias_linear", False),
        ropes=(rope if config.flag("use_mem_rope", False) else unturned(rope),),
        tied_embeddings=True,
        state=_state(config, len(kinds), hidden),
        attention_layers=uses,
        feed_forward_layers=(),
        shared_block=_shared(config, uses, num_blocks, num_heads) if uses else None,
        names=_names(uses, num_blocks),
    )


def _shared(config: ConfigReader, uses: tuple[int, ...], num_blocks: int, num_heads: int) -> SharedBlockSpec:
    adapts_attention = config.flag("use_shared_attention_adapter", False)
    kv_heads = config.count("num_key_value_heads", num_heads)
    if adapts_attention and kv_heads != num_heads:
        raise CheckpointError(
            f"{config.source}: num_key_value_heads = {kv_heads} is not num_attention_heads = {num_heads}, "
            "which use_shared_attention_adapter needs"
        )
    return SharedBlockSpec(
        layers=uses,
        num_blocks=num_blocks,
        rank=config.count("adapter_rank", 128),
        adapts_attention=adapts_attention,
    )


def _state(config: ConfigReader, num_layers: int, hidden: int) -> StateSpec:
    size, heads = config.count("mamba_expand", 2) * hidden, config.count("n_mamba_heads", 8)
    groups = config.count("mamba_ngroups", 1)
    config.require_multiple("mamba_expand * hidden_size", size, "n_mamba_heads", heads)
    config.require_multiple("n_mamba_heads", heads, "mamba_ngroups", groups)
    return mamba2_of(
        tuple(range(num_layers)),
        num_heads=heads,
        num_groups=groups,
        key_dim=config.count("mamba_d_state", 64),
        value_dim=size // heads,
        taps=config.count("mamba_d_conv", 4),
        convolution_bias=True,
        bias=config.flag("add_bias_linear", False),
        norm_size=size // groups,
        norm_eps=1e-5,
        step_limits=(config.number("time_step_min", 0.001), float("inf")),
    )


def _kinds(config: ConfigReader) -> list[bool]:
    """Of each layer whether it uses a block."""
    key = "layers_block_type" if config.values.get("layers_block_type") is not None else "layer_types"
    kinds, num_layers = config.values.get(key), config.count("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= set(_KINDS):
        raise CheckpointError(
            f"{config.source}: {key} must name {num_layers} layers mamba or hybrid, got {kinds!r}"
        )
    return [_KINDS[str(each)] for each in kinds]


def _names(uses: tuple[int, ...], num_blocks: int) -> TensorNames:
    """A block's tensors lie in the first layer that uses it, or in all of those."""
    renamed = [
        (
            rf"^model\.layers\.({'|'.join(map(str, uses[number::num_blocks]))})\.shared_transformer\.",
            f"model.shared_blocks.{number}.",
        )
        for number in range(min(num_blocks, len(uses)))
    ]
    renamed += [
        (r"^(model\.layers\.\d+)\.mamba_decoder\.", r"\1."),
        (r"^(model\.layers\.\d+)\.mamba\.", r"\1.state."),
        (r"^(model\.layers\.\d+)\.linear\.", r"\1.shared_output."),
        (r"^model\.final_layernorm\.", "model.norm."),
    ]
    return TensorNames(renamed=tuple(renamed))
