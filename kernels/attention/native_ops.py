"""Args and plans of the native attention ops (attention.h). No torch."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any

from kernels.native.library import NativeLibrary
from kernels.native.mirror import structure

AttentionPlanArgs = structure("AttentionPlanArgs")
AttentionArgs = structure("AttentionArgs")
# What a weight of 1 counts among votes (attention_votes.h).
VOTE = 1 << 27


def vote_rows(caches: Sequence[Any]) -> tuple[dict[int, int], int]:
    """By the id of a layer's cache the first of its kv heads' rows among the votes of all layers, and how
    many there are. Layers that share their keys share rows.
    """
    rows: dict[int, int] = {}
    count = 0
    for cache in caches:
        if id(cache) not in rows and hasattr(getattr(cache, "keys", None), "shape"):
            rows[id(cache)] = count
            count += cache.keys.shape[1]
    return rows, count


class NativeAttentionPlan:
    """How steps are cut into work; one for all layers with the same heads and block size."""

    def __init__(
        self,
        library: NativeLibrary,
        *,
        num_heads: int,
        num_kv_heads: int,
        value_dim: int,
        block_size: int,
        share: bool = True,
        pairs: bool | None = None,
    ) -> None:
        assert block_size in (1, 2, 4, 8, 16, 32, 64, 128, 256), f"block size {block_size}"
        sizes = (num_heads, num_kv_heads, value_dim, block_size, int(share))
        create = library.function("attention_plan_create", c_void_p, (c_int64,) * 5)
        destroy = library.function("attention_plan_destroy", argtypes=(c_void_p,))
        self.address: int = create(*sizes)
        if pairs is not None:
            library.function("attention_plan_use_pairs", None, (c_void_p, c_int64))(self.address, int(pairs))
        self.step: object = None  # that it was last made for
        weakref.finalize(self, destroy, self.address)
