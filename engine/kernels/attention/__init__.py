"""Attention over a paged cache. A back end is chosen once, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.lazy import lazily

if TYPE_CHECKING:
    from engine.kernels.attention.backends import (
        BACKENDS,
        AttentionBackend,
        AttentionFacts,
        AttentionOptions,
        CapturedAttention,
        Choice,
        DecodeBatch,
        NativeAttention,
        RaggedBatch,
        ReferenceAttention,
        TiledAttention,
        UnsuitableBackendError,
        available_backends,
        choose_backend,
    )

__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionFacts",
    "AttentionOptions",
    "CapturedAttention",
    "Choice",
    "DecodeBatch",
    "NativeAttention",
    "RaggedBatch",
    "ReferenceAttention",
    "TiledAttention",
    "UnsuitableBackendError",
    "available_backends",
    "choose_backend",
]

__getattr__ = lazily("engine.kernels.attention.backends", __all__)
