"""Args of the ops that make a whole decode step one program (decode.h)."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

from engine.kernels.native.mirror import fields


class DecodeArgs(ctypes.Structure):
    """Mirror of decode.h."""

    _fields_ = (
        *fields(c_void_p, "token_ids", "positions", "slots", "context_lens", "block_tables", "outputs"),
        *fields(c_void_p, "rows", "tokens", "blocks", "num_tokens"),
        *fields(c_void_p, "draws", "streams", "drawn", "finite", "allowed"),
        *fields(c_void_p, "appended"),
        *fields(c_int64, "num_sequences", "columns", "token_columns", "block_columns", "block_size"),
    )
