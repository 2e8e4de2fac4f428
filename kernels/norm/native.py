"""Args of the native norms (norm.h), and their op."""

from __future__ import annotations

import ctypes

from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure

NormArgs = structure("RmsNormArgs")


def norm_op(library: NativeLibrary, args: ctypes.Structure, *keep: object) -> Op:
    """Norms rows of the stream as NormArgs say; `keep` is what they point to."""
    return Op(library, "rms_norm", args, *keep)
