"""Attention of models whose layers differ in the number of kv heads: a back end for each number, of which a
layer's cache says which one serves it.

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
    """See the module. `backends` are by number of kv heads. Its steps are not captured in graphs."""

    def __init__(self, backends: dict[int, AttentionBackend]) -> None:
        self.backends = backends
        self.name = next(iter(backends.values())).name

    def plan(self, batch: RaggedBatch, device: torch.device) -> dict[int, Any]:
        """Each back end's plan of the step."""
        return {number: backend.plan(batch, device) for number, backend in self.backends.items()}

    def run(
        self,
        plan: dict[int, Any],
        q: Tensor,
        cache: LayerCache,
        options: AttentionOptions,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """q [T, H, D] -> [T, H, E]. sinks [H] are extra scores that attend to nothing."""
        number = cache.tensors()[0].shape[1]
        return self.backends[number].run(plan[number], q, cache, options, sinks)


def for_heads(kind: type[Any], num_heads: int, num_kv_heads: Iterable[int]) -> AttentionBackend:
    """The back end `kind` for layers of `num_heads` query heads and those numbers of kv heads."""
    numbers = sorted(set(num_kv_heads))
    backends: dict[int, AttentionBackend] = {
        number: kind(num_heads=num_heads, num_kv_heads=number) for number in numbers
    }
    return backends[numbers[0]] if len(numbers) == 1 else MixedAttention(backends)
