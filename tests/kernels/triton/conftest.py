"""Triton's interpreter runs the kernels on the CPU. It is chosen when a kernel is defined, so before any
import.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_plain = interpreter._convert_float
# Bits as numpy holds them, and torch's type of the same layout.
_TYPES: dict[Any, tuple[Any, torch.dtype]] = {
    tl.float8e4nv: (np.uint8, torch.float8_e4m3fn),
    tl.bfloat16: (np.uint16, torch.bfloat16),
    tl.float16: (np.uint16, torch.float16),
    tl.float32: (np.uint32, torch.float32),
}


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Rounds to nearest even, as hardware does: the interpreter's own conversion loses the carry of a
    mantissa that rounds up, and cuts bfloat16 off.
    """
    if source not in _TYPES or target not in _TYPES:
        return _plain(data, source, target, rounding)
    bits, torch_type = _TYPES[source]
    shape = np.shape(data)
    raw = np.frombuffer(np.ascontiguousarray(data).tobytes(), dtype=bits)
    tensor = torch.from_numpy(raw.view(f"i{raw.itemsize}").copy()).view(torch_type)
    result_bits, result_type = _TYPES[target]
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[np.dtype(result_bits).itemsize]
    return tensor.to(result_type).view(signed).numpy().view(result_bits).reshape(shape)


interpreter._convert_float = _convert
