"""Which attention back end serves, and why: decided once, at start, and said."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kernels.attention.flash_library import FlashUnavailableError

# Largest head dimension that flash-attn takes.
LARGEST_HEAD_DIM = 256


class UnsuitableBackendError(Exception):
    """The back end that was asked for cannot serve this model here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class AttentionFacts:
    """What of a model decides."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    sinks: bool
    # Some layers look no further back than the beginning of a chunk (Llama 4).
    chunks: bool = False
    # An indexer chooses positions (DeepSeek-V3.2).
    indexes: bool = False
    # Values are the beginning of the keys (latent attention).
    shares_values: bool


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """A name of BACKENDS, and a line that says why."""

    name: str
    why: str


def choose_backend(asked: str, facts: AttentionFacts, device: torch.device) -> AttentionChoice:
    """The back end for `engine.attention_backend`; "auto" takes the fastest that can serve.

    Raises UnsuitableBackendError when flash-attn is asked for and cannot serve. Other names are not checked.
    """
    if facts.indexes and asked not in ("auto", "torch"):
        raise UnsuitableBackendError(f"{asked} has no attention over positions that an indexer chooses")
    if facts.chunks and asked not in ("auto", "torch", "reference", "native"):
        raise UnsuitableBackendError(f"{asked} has no attention in chunks")
    if asked not in ("auto", "flash"):
        return AttentionChoice(name=asked, why="it was asked for")
    if facts.indexes:
        return AttentionChoice(name="torch", why="an indexer chooses positions, which torch alone computes")
    if facts.chunks:
        return AttentionChoice(name="torch", why="layers look at chunks, which torch alone computes")
    refusal = "it is for GPUs"
    if device.type == "cuda":
        refusal = _why_not_flash(facts)
        if not refusal:
            from kernels.attention.flash import installed_library

            return AttentionChoice(
                name="flash", why=f"{installed_library().name} for prompts, Triton for decoding"
            )
    if asked == "flash":
        raise UnsuitableBackendError(refusal)
    if device.type == "cuda" and find_spec("triton"):
        return AttentionChoice(name="triton", why=f"no flash-attn: {refusal}")
    return AttentionChoice(
        name="torch", why="there is no GPU" if device.type != "cuda" else "Triton is not installed"
    )


def _why_not_flash(facts: AttentionFacts) -> str:
    """Empty when flash-attn and Triton, which computes the rest, can serve."""
    reason = why_not(facts)
    if reason:
        return reason
    if not find_spec("triton"):
        return "Triton, which decodes beside it, is not installed"
    from kernels.attention.flash import installed_library

    try:
        installed_library()
    except FlashUnavailableError as error:
        return str(error)
    return ""


def why_not(facts: AttentionFacts) -> str:
    """What of a model flash-attn cannot do; empty when it can."""
    if facts.dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn computes in float16 and bfloat16, not {str(facts.dtype).removeprefix('torch.')}"
    if facts.shares_values:
        return "flash-attn has no values inside keys (latent attention)"
    if facts.sinks:
        return "flash-attn has no attention sinks"
    if facts.head_dim > LARGEST_HEAD_DIM or facts.head_dim % 8:
        return f"flash-attn takes heads of multiples of 8 up to {LARGEST_HEAD_DIM}, not {facts.head_dim}"
    if facts.head_dim != facts.value_dim:
        return f"flash-attn takes keys and values of one size, not {facts.head_dim} and {facts.value_dim}"
    return ""
