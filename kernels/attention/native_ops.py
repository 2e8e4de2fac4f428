"""Args and plans of the native attention ops (attention.h). No torch."""

from __future__ import annotations

import weakref
from ctypes import c_int64, c_void_p

from kernels.native.library import NativeLibrary
from kernels.native.mirror import structure

AttentionPlanArgs = structure("AttentionPlanArgs")
AttentionArgs = structure("AttentionArgs")


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
