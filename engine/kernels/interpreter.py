"""Makes Triton's interpreter round as hardware does, for tests and rehearsals on machines without a GPU.

The interpreter must be chosen (TRITON_INTERPRET=1) before a kernel is defined, and this called before one is
run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def round_as_hardware_does() -> None:
    """Conversions between floating-point types round to nearest even: the interpreter's own lose the carry of
    a mantissa that rounds up, and cut bfloat16 off.
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
