"""Args of the native look-up of embeddings (embedding.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

from engine.kernels.native.mirror import fields

# Name of a table's type to its number in embedding.h.
TABLE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class EmbeddingArgs(ctypes.Structure):
    """Mirror of embedding.h."""

    _fields_ = (
        *fields(c_void_p, "step", "table", "out"),
        *fields(c_int64, "width", "type"),
        ("scale", c_float),
    )
