"""Args of the ops that make a whole decode step one program (decode.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p


class DecodeArgs(ctypes.Structure):
    """Mirror of decode.h."""

    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("context_lens", c_void_p),
        ("block_tables", c_void_p),
        ("outputs", c_void_p),
        ("rows", c_void_p),
        ("tokens", c_void_p),
        ("blocks", c_void_p),
        ("num_tokens", c_void_p),
        ("draws", c_void_p),
        ("streams", c_void_p),
        ("drawn", c_void_p),
        ("finite", c_void_p),
        ("allowed", c_void_p),
        ("appended", c_void_p),
        ("num_sequences", c_int64),
        ("columns", c_int64),
        ("token_columns", c_int64),
        ("block_columns", c_int64),
        ("block_size", c_int64),
    )
