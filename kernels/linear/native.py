"""Packs weights for the native kernels, from the formats of `kernels/linear`.

Shape letters: M rows, N outputs, K inputs, G groups of inputs with a scale of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64

import torch
from torch import Tensor

from kernels.host import address_of
from kernels.linear.formats import (
    FP8_BLOCK,
    CodedWeight,
    DenseWeight,
    FloatCodedWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    PartedWeight,
    WeightFormat,
    parts_of,
)
from kernels.linear.packed import (
    BFLOAT16,
    CODED,
    FLOAT8,
    FLOAT12,
    FLOAT32,
    FLOAT_CODES,
    HALF_PAIRS,
    INPUT_MULTIPLE,
    INT4_GROUPED,
    INT8,
    INT8_DYNAMIC,
    INT8_GROUPED,
    OUTPUT_MULTIPLE,
    Arena,
    PackedWeight,
    PackedWeightStruct,
    gemm_args,
    make_workspace,
    product_ops,
)
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure

# Groups of inputs must be a multiple of this, by packed format.
GROUP_MULTIPLES = {INT4_GROUPED: 8, INT8_GROUPED: 4, FLOAT8: 1, FLOAT_CODES: 2}
# Inputs of a block that codes are taken apart by, and the smallest group.
CODED_BLOCK, CODED_LEAST_GROUP = 256, 16
# What a byte of steps stands for, by its type (gemm.h's StepKind).
STEP_KINDS = {torch.int8: 0, torch.uint8: 1, torch.float8_e4m3fn: 2}
# What the kernels read float8_e4m3 as is to be multiplied by.
FLOAT8_UNIT = 256.0
# Outputs of a float16 weight that are packed at a time, through float32; a multiple of a panel's.
PIECE_OUTPUTS = 4096


class NativePacker:
    """Packs weights into an arena, on the threads of a pool; with `float12` bfloat16 ones in 12 bits, with
    `half_pairs` float32 ones as two bfloat16 each, where that is faster.
    """

    def __init__(
        self, library: NativeLibrary, *, num_threads: int = 0, float12: bool = True, half_pairs: bool = False
    ) -> None:
        self.library = library
        self._float12 = float12
        self._half_pairs = half_pairs and bool(library.function("millrace_has_half_pairs", c_int64)())
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
        return self._float12 and bool(self._own_scales(FLOAT12))

    def pack(self, weight: WeightFormat, bias: Tensor | None = None) -> PackedWeight:
        """The packed form of a weight and its bias [N]. The source may be dropped afterwards."""
        source, scale, minimum, form = _plain(weight)
        steps, lows = _factors(weight)
        if source.dtype == torch.float16 and not self.keeps_float16:
            source, form = source.float(), FLOAT32
        form = self._best_form(source, form)
        outputs, inputs = weight.shape
        keeps_inputs = form in (FLOAT32, FLOAT8, FLOAT_CODES)
        padded = inputs if keeps_inputs else -(-inputs // INPUT_MULTIPLE) * INPUT_MULTIPLE
        padded_outputs = -(-outputs // OUTPUT_MULTIPLE) * OUTPUT_MULTIPLE
        struct = PackedWeightStruct(format=form, outputs=outputs, inputs=inputs, padded_inputs=padded)
        sizes: dict[str, int] = {}

        def take(part: str, num_bytes: int) -> int:
            sizes[part] = num_bytes
            return self.arena.take(num_bytes)

        struct.data = take("data", self._packed_bytes(form, outputs, padded))
        if scale is not None:
            groups = scale.shape[1]
            if isinstance(weight, CodedWeight):
                _describe_codes(weight, struct)
            elif form in GROUP_MULTIPLES:
                struct.group_size = inputs // groups
                assert struct.group_size % GROUP_MULTIPLES[form] == 0, f"groups of {struct.group_size} inputs"
            struct.scales = take("scales", groups * padded_outputs * 4)
            if minimum is not None:
                struct.minimums = take("minimums", groups * padded_outputs * 4)
            for part, values in (("steps", steps), ("lows", lows)):
                if values is not None:
                    setattr(struct, part, take(part, values.shape[1] * padded_outputs))
        elif self._own_scales(form):
            struct.scales = take("scales", padded_outputs * 4)
        bias = None if bias is None else bias.float().contiguous()
        if bias is not None:
            struct.bias = take("bias", padded_outputs * 4)
        _take_inputs(weight, struct, take)
        _take_book(weight, struct, take)
        if source.dtype == torch.float16:
            self._pack_float16(source, bias, struct)
        else:
            self._run(source, bias, scale, minimum, struct, steps, lows)
        return PackedWeight(struct, self.arena, sizes)

    def _best_form(self, source: Tensor, form: int) -> int:
        """What the level multiplies faster than `form`, where it has that; else `form`."""
        if source.dtype == torch.bfloat16 and self._fits_float12(source):
            return FLOAT12
        return HALF_PAIRS if form == FLOAT32 and self._half_pairs else form

    def _fits_float12(self, source: Tensor) -> bool:
        """Whether the level multiplies bfloat16 weights [N, K] out of 12 bits, and these hold nearly all."""
        if not self.packs_float12:
            return False
        args = structure("WidthArgs")(source.data_ptr(), *source.shape, 0)
        self.library.run([Op(self.library, "count_too_wide", args)], num_threads=self.num_threads)
        return not args.count

    def _pack_float16(self, source: Tensor, bias: Tensor | None, struct: ctypes.Structure) -> None:
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
        struct: ctypes.Structure,
        steps: Tensor | None = None,
        lows: Tensor | None = None,
    ) -> None:
        args = structure("PackArgs")(
            source.data_ptr(),
            source.element_size(),
            _pointer(bias),
            _pointer(scale),
            _pointer(minimum),
            _pointer(steps),
            _pointer(lows),
            struct,
        )
        self.library.run([Op(self.library, "pack_weight", args)], num_threads=self.num_threads)


def packed_by(
    pack: Callable[[WeightFormat, Tensor | None], PackedWeight],
    weight: WeightFormat | PartedWeight,
    bias: Tensor | None,
) -> PackedWeight | tuple[PackedWeight, ...]:
    """A weight with its bias [N], packed by `pack`: one, or the parts of several forms side by side."""
    parts = parts_of(weight)
    if len(parts) == 1:
        return pack(parts[0], bias)
    sizes = [part.shape[0] for part in parts]
    biases = [None] * len(parts) if bias is None else torch.split(bias, sizes)
    return tuple(pack(part, each) for part, each in zip(parts, biases, strict=True))


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
            weight, ctypes.addressof(count), rows.data_ptr(), out.data_ptr(), address_of(workspace)
        )
        library.run(product_ops(library, args), num_threads=self.num_threads)
        return out.to(x.dtype)


def _take_inputs(weight: WeightFormat, struct: ctypes.Structure, take: Callable[[str, int], int]) -> None:
    """Copies what a format does to a product's inputs [K]: factors, and their order."""
    for part, dtype in (("smoothing", torch.float32), ("order", torch.int64)):
        values = getattr(weight, part, None)
        if values is not None:
            values = values.to(dtype).contiguous()
            setattr(struct, part, take(part, values.nbytes))
            ctypes.memmove(getattr(struct, part), values.data_ptr(), values.nbytes)


def _factors(weight: WeightFormat) -> tuple[Tensor | None, Tensor | None]:
    """Bytes of steps and lows [N, G]."""
    if not isinstance(weight, CodedWeight):
        return None, None
    step, low = weight.step, weight.low
    steps = None if step is None else step.view(torch.uint8).contiguous()
    return steps, None if low is None else low.contiguous()


def _describe_codes(weight: CodedWeight, struct: ctypes.Structure) -> None:
    inputs, zero = weight.shape[1], -weight.book[0]
    group = struct.group_size = inputs // weight.num_groups
    struct.span = inputs // weight.scale.shape[1]
    assert CODED_BLOCK % group == 0 <= group - CODED_LEAST_GROUP, f"groups of {group} inputs"
    assert inputs % group == 0 == struct.span % group, f"spans of {struct.span} inputs"
    struct.step_kind = 0 if weight.step is None else STEP_KINDS[weight.step.dtype]
    struct.code_zero = zero


def _take_book(weight: WeightFormat, struct: ctypes.Structure, take: Callable[[str, int], int]) -> None:
    """Copies what codes stand for, where that is more than a difference."""
    if isinstance(weight, FloatCodedWeight):
        values = weight.book.float().contiguous()
    elif isinstance(weight, CodedWeight) and not weight.has_levels:
        assert weight.bits == 4, "codebooks have 16 numbers"
        values = (torch.tensor(weight.book) + 128).to(torch.uint8)
    else:
        return
    struct.codebook = take("codebook", values.nbytes)
    ctypes.memmove(struct.codebook, values.data_ptr(), values.nbytes)


def _plain(weight: WeightFormat) -> tuple[Tensor, Tensor | None, Tensor | None, int]:
    """Values, scales [N, G], minimums [N, G] and the packed format."""
    if isinstance(weight, DenseWeight):
        values = weight.values
        if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            values = values.float()
        form = FLOAT32 if values.dtype == torch.float32 else BFLOAT16
        return values.contiguous(), None, None, form
    scale = weight.scale.float().contiguous()
    if isinstance(weight, CodedWeight):
        minimum = None if weight.minimum is None else -weight.minimum.float().contiguous()
        if weight.step is not None and weight.step.dtype == torch.float8_e4m3fn:
            scale = scale * FLOAT8_UNIT
        return weight.codes.contiguous(), scale, minimum, CODED + weight.bits
    if isinstance(weight, FloatCodedWeight):
        return weight.codes.contiguous(), scale, None, FLOAT_CODES
    if isinstance(weight, Fp8Weight):
        assert not weight.rounds_inputs, "inputs that are rounded to fp8 have no packed form"
        if weight.blocked:
            scale = scale.repeat_interleave(FP8_BLOCK, 0)[: weight.shape[0]].contiguous()
        return weight.values.contiguous(), scale.view(weight.shape[0], -1), None, FLOAT8
    if isinstance(weight, Int4Weight):
        minimum = None if weight.minimum is None else weight.minimum.float().contiguous()
        return weight.packed.contiguous(), scale, minimum, INT4_GROUPED
    assert isinstance(weight, Int8Weight), f"{type(weight).__name__} has no packed form"
    whole = INT8_DYNAMIC if weight.activations == "int8" else INT8
    form = INT8_GROUPED if scale.shape[1] > 1 else whole
    return weight.values.contiguous(), scale, None, form


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
