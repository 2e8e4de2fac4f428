"""Makes Triton's interpreter compute as hardware does, for tests and rehearsals on machines without a GPU: it
rounds to nearest even, and adds in an order of its own.

The interpreter must be chosen (TRITON_INTERPRET=1) before a kernel is defined, and this called before one is
run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def round_as_hardware_does() -> None:
    """Conversions between floating-point types round to nearest even: the interpreter's own lose the carry of
    a mantissa that rounds up, and cut bfloat16 off. Arithmetic of bfloat16 is its own. A block of one element
    is a number, which Triton 3.6 and numpy 2.4 do not agree on.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter._convert_float
    # Bits as numpy holds them, and torch's type of the same layout.
    types: dict[Any, tuple[Any, torch.dtype]] = {
        tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
        tl.bfloat16: (np.uint16, torch.bfloat16),
        tl.float16: (np.uint16, torch.float16),
        tl.float32: (np.uint32, torch.float32),
    }

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source not in types or target not in types:
            return plain(data, source, target, rounding)
        bits, torch_type = types[source]
        shape = np.shape(data)
        raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), dtype=bits)
        tensor = torch.from_numpy(raw.view(f"i{raw.itemsize}").copy()).view(torch_type)
        result_bits, result_type = types[target]
        signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[np.dtype(result_bits).itemsize]
        return tensor.to(result_type).view(signed).numpy().view(result_bits).reshape(shape)

    interpreter._convert_float = convert
    plain_tensor = interpreter._patch_lang_tensor

    def make_tensor(tensor: Any, *scope: Any) -> None:
        plain_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = make_tensor
    _compute_bfloat16(convert)


def _compute_bfloat16(convert: Any) -> None:
    """Arithmetic of bfloat16 in float32, products of tiles too, and conversions from and to whole numbers by
    way of it: numpy holds its bits, which it would take for whole numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    binary_op = interpreter.InterpreterBuilder.binary_op

    def compute(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return binary_op(self, left, right, op)
        widened = (convert(each.data, tl.bfloat16, tl.float32, None) for each in (left, right))
        found = op(*(each.view(np.float32) for each in widened))
        if found.dtype == np.bool_:
            return interpreter.TensorHandle(found, tl.int1)
        return interpreter.TensorHandle(convert(found, tl.float32, tl.bfloat16, None), tl.bfloat16)

    cast = interpreter.InterpreterBuilder.cast_impl

    def cast_by_float32(self: Any, source: Any, target: Any) -> Any:
        if tl.bfloat16 in (source.dtype.scalar, target.scalar) and source.dtype.scalar != target.scalar:
            source = cast(self, source, tl.float32)
        return cast(self, source, target)

    dot = interpreter.InterpreterBuilder.create_dot

    def widened_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        sides = (
            cast(self, each, tl.float32) if each.dtype.scalar == tl.bfloat16 else each for each in (a, b)
        )
        return dot(self, *sides, *others)

    def number(self: Any, value: float) -> Any:
        # Triton 3.6 has none of this type.
        return cast(self, self.get_fp32(value), tl.bfloat16)

    interpreter.InterpreterBuilder.get_bf16 = number
    interpreter.InterpreterBuilder.binary_op = compute
    interpreter.InterpreterBuilder.cast_impl = cast_by_float32
    interpreter.InterpreterBuilder.create_dot = widened_dot


def add_in_one_order() -> None:
    """A product of tiles adds along its inner dimension from the first to the last element, whatever the tile
    and the processor: the interpreter's own is BLAS, which has a kernel for each processor and shape. A GPU's
    instruction has one order, too, on which kernels rely that promise the same bits in any batch.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype.kind != "f":
            # Sums of integers have no order, and these are exact in float64, for which there is BLAS.
            wide = np.matmul(a.data, b.data, dtype=np.float64)
            return interpreter.TensorHandle(wide.astype(d.data.dtype) + d.data, d.dtype.scalar)
        left, right = (_widened(tile, d.data.dtype) for tile in (a, b))
        # K before M and N in memory: the sum goes over whole tiles then, one after the other.
        k_first = (left.shape[-1], *left.shape[:-1], right.shape[-1])
        products = np.empty(k_first, left.dtype)
        columns, rows = np.moveaxis(left, -1, 0), np.moveaxis(right, -2, 0)
        np.multiply(columns[..., None], rows[..., None, :], out=products)
        return interpreter.TensorHandle(np.add.reduce(products, axis=0) + d.data, d.dtype.scalar)

    def _widened(tile: Any, dtype: Any) -> Any:
        data = tile.data
        if tile.dtype.is_floating() and tile.dtype.primitive_bitwidth == 8:
            data = interpreter._convert_float(data, tile.dtype, tl.float16, None).view(np.float16)
        elif tile.dtype.scalar == tl.bfloat16:
            data = interpreter._convert_float(data, tl.bfloat16, tl.float32, None).view(np.float32)
        return data.astype(dtype)

    interpreter.InterpreterBuilder.create_dot = create_dot


def prepare_the_language_once() -> None:
    """What kernels call is made to be interpreted when a module's first kernel runs, and stays so: the
    interpreter does it, and undoes it, at every launch and every call of a function, a quarter of its time.
    """
    from triton.runtime import interpreter

    plain = interpreter._patch_lang
    prepared: set[int] = set()

    def prepare(function: Any) -> Any:
        if id(function.__globals__) not in prepared:
            plain(function)
            prepared.add(id(function.__globals__))
        # Nothing to undo.
        return interpreter._LangPatchScope()

    interpreter._patch_lang = prepare
