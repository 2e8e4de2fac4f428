"""Attention of models whose layers differ in the number of heads: a back end for each number of query heads
and of kv heads, of which a layer's queries and cache say which one serves it.

Shape letters: T tokens, H query heads, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from kernels.attention.backends import AttentionBackend
from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.paged_cache.store import LayerCache


class MixedAttention:
    """See the module. `backends` are by query and kv heads. Its steps are not captured in graphs."""

    def __init__(self, backends: dict[tuple[int, int], AttentionBackend]) -> None:
        self.backends = backends
        self.name = next(iter(backends.values())).name

    def plan(self, batch: RaggedBatch, device: torch.device) -> dict[tuple[int, int], Any]:
        """Each back end's plan of the step."""
        return {numbers: backend.plan(batch, device) for numbers, backend in self.backends.items()}

    def run(
        self,
        plan: dict[tuple[int, int], Any],
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        numbers = (q.shape[1], cache.tensors()[0].shape[1])
        return self.backends[numbers].run(plan[numbers], q, cache, options, sinks)


def for_heads(kind: type[Any], heads: Iterable[tuple[int, int]]) -> AttentionBackend:
    """The back end `kind` for layers of those numbers of query heads and of kv heads."""
    numbers = sorted(set(heads))
    backends: dict[tuple[int, int], AttentionBackend] = {
        each: kind(num_heads=each[0], num_kv_heads=each[1]) for each in numbers
    }
    return backends[numbers[0]] if len(numbers) == 1 else MixedAttention(backends)
