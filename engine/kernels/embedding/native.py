"""Args of the native look-up of embeddings (embedding.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

# Name of a table's type to its number in embedding.h.
TABLE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


class EmbeddingArgs(ctypes.Structure):
    """Mirror of embedding.h."""

    _fields_ = (
        ("step", c_void_p),
        ("table", c_void_p),
        ("out", c_void_p),
        ("width", c_int64),
        ("type", c_int64),
        ("scale", c_float),
    )
