"""The attention back end of a model, chosen at start and said in the log."""

from __future__ import annotations

import logging

import torch

from engine.config import EngineConfig
from engine.model.indexer import torch_attention
from engine.model.spec import ModelSpec
from kernels.attention.backends import AttentionBackend, available_backends
from kernels.attention.choice import AttentionFacts, UnsuitableBackendError, choose_backend
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

# Back ends whose queries may look at what comes behind them.
LOOK_AHEAD = ("native", "reference", "torch")


def attention_of(
    config: EngineConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The back end that `engine.attention_backend` names, or the fastest that can serve `spec` in `dtype`.

    Raises ConfigError when the name is unknown, or flash-attn is asked for and cannot serve.
    """
    served = config.max_model_len or spec.max_positions
    asked = _looking_ahead(config, spec) if spec.bidirectional else config.attention_backend
    available = available_backends()
    facts = AttentionFacts(
        dtype=dtype,
        head_dim=spec.query_key_dim,
        value_dim=spec.value_dim,
        sinks=spec.attention_sinks,
        shares_values=spec.latent is not None,
        indexes=spec.latent is not None and spec.latent.indexer is not None,
        # Within one chunk there is no difference.
        chunks=any(chunk is not None and chunk < served for chunk in spec.chunks),
    )
    try:
        choice = choose_backend(asked, facts, device)
    except UnsuitableBackendError as error:
        raise ConfigError(
            f"engine.attention_backend = {asked!r}: {error}; set it to auto, or one of "
            f"{', '.join(sorted(available))}"
        ) from error
    if choice.name not in available:
        raise ConfigError(
            f"engine.attention_backend = {asked!r}: must be auto or one of {', '.join(sorted(available))}"
        )
    if device.type == "cuda":
        # On CPUs the native kernels may come before it.
        _log.info("attention: %s (%s)", choice.name, choice.why)
    backend: AttentionBackend = torch_attention(spec, available[choice.name])
    return backend


def _looking_ahead(config: EngineConfig, spec: ModelSpec) -> str:
    """The back end of an encoder. Raises ConfigError for one whose queries look back alone."""
    asked = config.attention_backend
    if asked not in ("auto", *LOOK_AHEAD):
        raise ConfigError(
            f"engine.attention_backend = {asked!r} looks back alone, and {spec.architecture} looks ahead as "
            f"well; set it to auto, or one of {', '.join(LOOK_AHEAD)}"
        )
    return "torch" if asked == "auto" else asked
