"""Args of the native norm (norm.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p


class RmsNormArgs(ctypes.Structure):
    """Mirror of norm.h: norms, and the residual stream between them."""

    _fields_ = (
        ("step", c_void_p),
        ("x", c_void_p),
        ("change", c_void_p),
        ("change_weight", c_void_p),
        ("residual", c_void_p),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("logit_rows", c_int64),
        ("eps", c_float),
    )
