"""Packed weights and their products (gemm.h says how they lie in memory). No torch: who
packs them is in `native`.

Shape letters: M rows, N outputs, K inputs.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels.host import empty
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure

FLOAT32, BFLOAT16, INT8, INT8_DYNAMIC, INT4_GROUPED, INT8_GROUPED = range(6)
FLOAT12, FLOAT8, FLOAT_CODES, HALF_PAIRS = range(6, 10)
# Plus the bits of a code.
CODED = 16
# Levels that multiply bfloat16 weights out of 12 bits.
FLOAT12_LEVELS = ("avx2", "avx2_vnni", "avx512_fp16")
# Outputs are padded to a multiple of this with zeros, inputs to one of the other, or not (float32).
OUTPUT_MULTIPLE = 16
INPUT_MULTIPLE = 64


PackedWeightStruct = structure("PackedWeight")


@dataclass(frozen=True)
class PackedWeight:
    """A weight in an arena; lives as long as that."""

    struct: ctypes.Structure
    arena: Arena
    # Bytes of each of its parts that are there, by their names in the struct.
    sizes: Mapping[str, int]

    @property
    def outputs(self) -> int:
        """N."""
        return int(self.struct.outputs)

    @property
    def inputs(self) -> int:
        """K."""
        return int(self.struct.inputs)


class Arena:
    """Memory for the weights of one model, on huge pages where the system has them; freed with the object."""

    def __init__(self, library: NativeLibrary) -> None:
        self.library = library
        self._handle = library.function("millrace_arena_create", c_void_p)()
        self._take = library.function("millrace_arena_take", c_void_p, (c_void_p, c_int64))
        self._total = library.function("millrace_arena_total", c_int64, (c_void_p,))
        destroy = library.function("millrace_arena_destroy", None, (c_void_p,))
        weakref.finalize(self, destroy, self._handle)

    def take(self, num_bytes: int) -> int:
        """Address of that many zeroed bytes. Raises MemoryError."""
        address = self._take(self._handle, num_bytes)
        if not address:
            raise MemoryError(f"no memory for {num_bytes} bytes of packed weights")
        return int(address)

    def num_bytes(self) -> int:
        """Bytes given out."""
        return int(self._total(self._handle))


def gemm_args(
    weight: PackedWeight,
    num_rows: int,
    x: int,
    out: int,
    workspace: int,
    *,
    x_stride: int = 0,
    out_stride: int = 0,
    accumulate: bool = False,
) -> Any:
    """Args of a product; all but the strides (in floats, 0 is dense) are addresses."""
    return structure("GemmArgs")(
        num_rows,
        x,
        out,
        x_stride or weight.inputs,
        out_stride or weight.outputs,
        int(accumulate),
        workspace,
        weight.struct,
    )


def product_ops(library: NativeLibrary, args: ctypes.Structure, *keep: object) -> list[Op]:
    """What computes a product: the conversion of its rows, then the product. `keep` is what args point to."""
    return [Op(library, "gemm_rows", args, *keep), Op(library, "gemm", args, *keep)]


def make_workspace(
    library: NativeLibrary, max_rows: int, max_inputs: int, num_threads: int
) -> NDArray[np.uint8]:
    """Room for the converted rows of a product; aligned to cache lines."""
    needed = library.function("millrace_gemm_workspace", c_int64, (c_int64,) * 3)
    padded = -(-max_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    count = library.num_threads(num_threads)
    return empty((int(needed(max_rows, padded, count)) + 64,), np.uint8)
