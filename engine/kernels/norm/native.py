"""Args of the native norm (norm.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from engine.kernels.native.mirror import fields


class RmsNormArgs(ctypes.Structure):
    """Mirror of norm.h: norms, and the residual stream between them."""

    _fields_ = (
        *fields(c_void_p, "step", "x", "change", "change_weight", "residual", "weight", "out"),
        *fields(c_int64, "width", "logit_rows"),
        ("eps", c_float),
    )
