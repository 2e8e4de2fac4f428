"""Args of the op that only reads (streaming.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p


class StreamArgs(ctypes.Structure):
    """Mirror of streaming.h."""

    _fields_ = (("data", c_void_p), ("bytes", c_int64), ("sum", c_int64))
