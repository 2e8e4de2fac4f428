"""Weights packed for the native kernels (engine/kernels/native/gemm.h says how they lie in memory).

Shape letters: M rows, N outputs, K inputs, G groups of inputs with a scale of their own.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight, WeightFormat
from engine.kernels.native import NativeLibrary, Op

FLOAT32, BFLOAT16, INT8, INT8_DYNAMIC, INT4_GROUPED, INT8_GROUPED, FLOAT12 = range(7)
# Outputs are padded to a multiple of this with zeros, inputs to one of the other (float32 inputs are not).
OUTPUT_MULTIPLE = 16
INPUT_MULTIPLE = 64
# Groups of inputs must be a multiple of this, by packed format.
GROUP_MULTIPLES = {INT4_GROUPED: 8, INT8_GROUPED: 4}
# Outputs of a float16 weight that are packed at a time, through float32; a multiple of a panel's.
PIECE_OUTPUTS = 4096


class PackedWeightStruct(ctypes.Structure):
    """Mirror of `PackedWeight`."""

    _fields_ = (
        ("format", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("padded_inputs", c_int64),
        ("group_size", c_int64),
        ("data", c_void_p),
        ("scales", c_void_p),
        ("minimums", c_void_p),
        ("bias", c_void_p),
        ("smoothing", c_void_p),
        ("order", c_void_p),
    )


class _PackArgs(ctypes.Structure):
    _fields_ = (
        ("source", c_void_p),
        ("source_bytes", c_int64),
        ("bias", c_void_p),
        ("source_scales", c_void_p),
        ("source_minimums", c_void_p),
        ("weight", PackedWeightStruct),
    )


class _WidthArgs(ctypes.Structure):
    _fields_ = (("source", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("count", c_int64))


class GemmArgs(ctypes.Structure):
    """Mirror of `GemmArgs`."""

    _fields_ = (
        ("num_rows", c_void_p),
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        ("accumulate", c_int64),
        ("workspace", c_void_p),
        ("weight", PackedWeightStruct),
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight in an arena; lives as long as that."""

    struct: PackedWeightStruct
    arena: Arena

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


class NativePacker:
    """Packs weights into an arena, on the threads of a pool; with `float12` bfloat16 ones in 12 bits."""

    def __init__(self, library: NativeLibrary, *, num_threads: int = 0, float12: bool = True) -> None:
        self.library = library
        self._float12 = float12
        self.arena = Arena(library)
        self.num_threads = num_threads
        self._packed_bytes = library.function("millrace_packed_bytes", c_int64, (c_int64,) * 3)
        self._own_scales = library.function("millrace_own_scales", c_int64, (c_int64,))

    @property
    def keeps_float16(self) -> bool:
        """Whether the 16 bits of a packed weight are those of float16, so that float16 loses nothing."""
        return bool(self._own_scales(BFLOAT16))

    @property
    def packs_float12(self) -> bool:
        """Whether bfloat16 weights lie in 12 bits wherever these hold nearly all of them."""
        return self._float12 and self.keeps_float16

    def pack(self, weight: WeightFormat, bias: Tensor | None = None) -> PackedWeight:
        """The packed form of a weight and its bias [N]. The source may be dropped afterwards."""
        source, scale, minimum, form = _plain(weight)
        if source.dtype == torch.float16 and not self.keeps_float16:
            source, form = source.float(), FLOAT32
        outputs, inputs = weight.shape
        if source.dtype == torch.bfloat16 and self._fits_float12(source):
            form = FLOAT12
        padded = inputs if form == FLOAT32 else -(-inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
        padded_outputs = -(-outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
        struct = PackedWeightStruct(format=form, outputs=outputs, inputs=inputs, padded_inputs=padded)
        take = self.arena.take
        struct.data = take(self._packed_bytes(form, outputs, padded))
        if scale is not None:
            groups = scale.shape[1]
            if form in GROUP_MULTIPLES:
                struct.group_size = inputs // groups
                assert struct.group_size % GROUP_MULTIPLES[form] == 0, f"groups of {struct.group_size} inputs"
            struct.scales = take(groups * padded_outputs * 4)
            struct.minimums = take(groups * padded_outputs * 4) if minimum is not None else None
        elif self._own_scales(form):
            struct.scales = take(padded_outputs * 4)
        bias = None if bias is None else bias.float().contiguous()
        struct.bias = None if bias is None else take(padded_outputs * 4)
        struct.smoothing = self._kept(getattr(weight, "smoothing", None), torch.float32)
        struct.order = self._kept(getattr(weight, "order", None), torch.int64)
        if source.dtype == torch.float16:
            self._pack_float16(source, bias, struct)
        else:
            self._run(source, bias, scale, minimum, struct)
        return PackedWeight(struct, self.arena)

    def _fits_float12(self, source: Tensor) -> bool:
        """Whether the level multiplies bfloat16 weights [N, K] out of 12 bits, and these hold nearly all."""
        if not self.packs_float12:
            return False
        args = _WidthArgs(source.data_ptr(), *source.shape, 0)
        self.library.run([Op(self.library, "count_too_wide", args)], num_threads=self.num_threads)
        return not args.count

    def _pack_float16(self, source: Tensor, bias: Tensor | None, struct: PackedWeightStruct) -> None:
        """Piece by piece, each in float32 for as long as it takes."""
        for first in range(0, source.shape[0], PIECE_OUTPUTS):
            part = slice(first, first + PIECE_OUTPUTS)
            piece = PackedWeightStruct.from_buffer_copy(struct)
            piece.outputs = min(PIECE_OUTPUTS, source.shape[0] - first)
            piece.data += first * struct.padded_inputs * source.element_size()
            piece.scales += first * 4
            if bias is not None:
                piece.bias += first * 4
            self._run(source[part].float(), None if bias is None else bias[part], None, None, piece)

    def _run(
        self,
        source: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        minimum: Tensor | None,
        struct: PackedWeightStruct,
    ) -> None:
        args = _PackArgs(
            source.data_ptr(),
            source.element_size(),
            _pointer(bias),
            _pointer(scale),
            _pointer(minimum),
            struct,
        )
        self.library.run([Op(self.library, "pack_weight", args)], num_threads=self.num_threads)

    def _kept(self, values: Tensor | None, dtype: torch.dtype) -> int | None:
        """Address of a copy in the arena."""
        if values is None:
            return None
        values = values.to(dtype).contiguous()
        num_bytes = values.numel() * values.element_size()
        address = self.arena.take(num_bytes)
        ctypes.memmove(address, values.data_ptr(), num_bytes)
        return address


class NativeProduct:
    """A packed weight as a torch product, for rows outside a program. It takes any number of rows."""

    def __init__(self, weight: PackedWeight, *, num_threads: int = 0) -> None:
        self.weight = weight
        self.num_threads = num_threads

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, K] -> [M, N] in the type of x. The bias is part of the packed weight."""
        assert bias is None, "a packed weight holds its bias"
        library, weight = self.weight.arena.library, self.weight
        rows = x.float().contiguous()
        out = torch.empty(rows.shape[0], weight.outputs)
        workspace = make_workspace(library, rows.shape[0], weight.inputs, self.num_threads)
        count = c_int64(rows.shape[0])
        args = gemm_args(
            weight, ctypes.addressof(count), rows.data_ptr(), out.data_ptr(), workspace.data_ptr()
        )
        library.run(product_ops(library, args), num_threads=self.num_threads)
        return out.to(x.dtype)


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
) -> GemmArgs:
    """Args of a product; all but the strides (in floats, 0 is dense) are addresses."""
    return GemmArgs(
        num_rows,
        x,
        out,
        x_stride or weight.inputs,
        out_stride or weight.outputs,
        int(accumulate),
        workspace,
        weight.struct,
    )


def product_ops(library: NativeLibrary, args: GemmArgs, *keep: object) -> list[Op]:
    """What computes a product: the conversion of its rows, then the product. `keep` is what args point to."""
    return [Op(library, "gemm_rows", args, *keep), Op(library, "gemm", args, *keep)]


def make_workspace(library: NativeLibrary, max_rows: int, max_inputs: int, num_threads: int) -> Tensor:
    """Room for the converted rows of a product; aligned to cache lines."""
    needed = library.function("millrace_gemm_workspace", c_int64, (c_int64,) * 3)
    padded = -(-max_inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
    count = library.num_threads(num_threads)
    return torch.empty(int(needed(max_rows, padded, count)) + 64, dtype=torch.uint8)


def _plain(weight: WeightFormat) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Values, scales [N, G], minimums [N, G] and the packed format."""
    if isinstance(weight, DenseWeight):
        values = weight.values
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            values = values.float()
        form = FLOAT32 if values.dtype == torch.float32 else BFLOAT16
        return values.contiguous(), None, None, form
    scale = weight.scale.float().contiguous()
    if isinstance(weight, Int4Weight):
        minimum = None if weight.minimum is None else weight.minimum.float().contiguous()
        return weight.packed.contiguous(), scale, minimum, INT4_GROUPED
    assert isinstance(weight, Int8Weight), f"{type(weight).__name__} has no packed form"
    whole = INT8_DYNAMIC if weight.activations == "int8" else INT8
    form = INT8_GROUPED if scale.shape[1] > 1 else whole
    return weight.values.contiguous(), scale, None, form


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
