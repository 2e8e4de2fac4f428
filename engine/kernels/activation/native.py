"""Args of the native gates (activation.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from engine.kernels.native.mirror import fields

# Values of ActivationKind.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3}


class ActivationArgs(ctypes.Structure):
    """Mirror of activation.h: act(gate) * up."""

    _fields_ = (
        *fields(c_void_p, "step", "num_rows", "gate_up", "out"),
        *fields(c_int64, "width", "out_stride", "kind"),
    )


class SoftCapArgs(ctypes.Structure):
    """Mirror of activation.h: the cap on logits."""

    _fields_ = (*fields(c_void_p, "step", "logits"), ("width", c_int64), ("cap", c_float))
