"""Args of the native look-up of embeddings (embedding.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch

# Type of a table to its number in embedding.h.
TABLE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


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
