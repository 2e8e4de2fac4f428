"""Attention over a paged cache. A back end is chosen once, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from kernels.attention.native import NativeAttention
from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.reference import ReferenceAttention
from kernels.attention.tiled import TiledAttention
from kernels.config import triton_interprets
from kernels.paged_cache.store import LayerCache


class AttentionBackend(Protocol):
    """Computes attention of one step; `plan` once per step, `run` once per layer.

    What is captured in graphs has more rules: see CapturedAttention and DESIGN.md.
    """

    name: str

    def plan(self, batch: RaggedBatch, device: torch.device) -> Any:
        """What all layers of the step share."""

    def run(
        self, plan: Any, q: Tensor, cache: LayerCache, options: AttentionOptions, sinks: Tensor | None = None
    ) -> Tensor:
        """q [T, H, D] -> [T, H, E]; the step's own keys and values are in the cache already."""


class CapturedSteps(Protocol):
    """What a back end keeps for captured steps, in buffers that all sizes share."""

    def first(self, rows: int) -> Self:
        """For steps of so many rows."""


@runtime_checkable
class CapturedAttention(AttentionBackend, Protocol):
    """A back end whose decode steps can be captured in a graph."""

    def plan_decode(self, batch: DecodeBatch) -> CapturedSteps:
        """Plans for any step of up to so many rows, whatever the buffers hold by then. Not captured; who
        captures keeps the result as long as its graphs, which read what it holds.
        """

    def begin(self, plan: CapturedSteps) -> None:
        """Captured, before the first layer: derives from the buffers what `run` needs, on the device."""

    def captured_workspace_bytes(self, rows: int, max_context_len: int, head_dim: int) -> int:
        """Bytes of temporaries that a captured step of so many rows takes."""


BACKENDS: dict[str, type[Any]] = {
    "reference": ReferenceAttention,
    "torch": TiledAttention,
    "native": NativeAttention,
}
"""Back ends that run anywhere, by name."""


def available_backends() -> Mapping[str, type[Any]]:
    """Name in `engine.attention_backend` to back end, of those that can run here. Which of them "auto" is,
    `choice` decides; on CPUs that can run them the native kernels come first.
    """
    found = dict(BACKENDS)
    if find_spec("triton") and (torch.cuda.is_available() or triton_interprets()):
        # Importing Triton takes time, and it runs on GPUs alone, but for its interpreter.
        from kernels.attention.triton_attention import TritonAttention

        found["triton"] = TritonAttention
        if find_spec("flash_attn") or find_spec("flash_attn_interface"):
            from kernels.attention.flash import FlashAttention

            found["flash"] = FlashAttention
    return found
