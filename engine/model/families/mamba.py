"""Mamba: a selective scan in every layer, and nothing else."""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family, states_alone
from engine.model.spec import CheckpointError, ModelSpec, StateSpec, TensorNames

# A checkpoint of the state-spaces form has "embedding", and Codestral Mamba "model." before all.
NAMES = TensorNames(
    renamed=(
        (r"^(?:model\.)?backbone\.", "model."),
        (r"^model\.lm_head\.", "lm_head."),
        (r"^model\.embeddings?\.", "model.embed_tokens."),
        (r"^model\.norm_f\.", "model.norm."),
        (r"\.mixer\.", ".state."),
        (r"^(model\.layers\.\d+)\.norm\.", r"\1.input_layernorm."),
    )
)


@family("MambaForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Mamba as state-spaces/mamba-*-hf."""
    return _read(config, selection_norm="none")


@family("FalconMambaForCausalLM")
def read_falcon(config: ConfigReader) -> ModelSpec:
    """Falcon Mamba norms what the scan takes in, without weights."""
    eps = config.number("mixer_rms_eps", 1e-6)
    return _read(config, selection_norm="plain", norm_eps=eps)


def _read(config: ConfigReader, **fields: Any) -> ModelSpec:
    config.require("hidden_act", "silu", "silu")
    num_layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    channels = inner_size(config, hidden)
    state = selective(
        tuple(range(num_layers)),
        channels=channels,
        taps=config.count("conv_kernel", 4),
        key_dim=config.count("state_size", 16),
        low_rank=step_rank(config, "time_step_rank", hidden),
        convolution_bias=config.flag("use_conv_bias", True),
        bias=config.flag("use_bias", False),
        **fields,
    )
    return states_alone(
        config,
        state,
        eps=config.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        names=NAMES,
    )


def selective(layers: tuple[int, ...], *, channels: int, **fields: Any) -> StateSpec:
    """A selective scan of so many channels."""
    return StateSpec(
        kind="selective",
        layers=layers,
        channels=channels,
        num_heads=1,
        num_groups=1,
        value_dim=channels,
        **fields,
    )


def step_rank(config: ConfigReader, name: str, hidden: int) -> int:
    """Rank of the product that makes time steps, which the key `name` says; a sixteenth of the hidden size
    where it says nothing.
    """
    automatic = config.values.get(name, "auto") in ("auto", None)
    return -(-hidden // 16) if automatic else config.count(name)


def inner_size(config: ConfigReader, hidden: int) -> int:
    """Elements of a layer's states: `expand` times the hidden size, which may be said once more."""
    size, stated = int(config.number("expand", 2) * hidden), config.optional_integer("intermediate_size")
    if stated not in (None, size):
        raise CheckpointError(
            f"{config.source}: intermediate_size = {stated} and expand * hidden_size = {size} contradict "
            "each other"
        )
    return size
