"""Args of the native gates (activation.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

# Values of ActivationKind.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


class ActivationArgs(ctypes.Structure):
    """Mirror of activation.h: act(gate) * up."""

    _fields_ = (
        ("step", c_void_p),
        ("num_rows", c_void_p),
        ("gate_up", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("out_stride", c_int64),
        ("kind", c_int64),
    )


class SoftCapArgs(ctypes.Structure):
    """Mirror of activation.h: the cap on logits."""

    _fields_ = (("step", c_void_p), ("logits", c_void_p), ("width", c_int64), ("cap", c_float))
