"""Kernels in C++ for CPUs, built on first use. See DESIGN.md."""

from kernels.native.library import (
    NativeLibrary,
    NativeUnavailableError,
    Op,
    UnknownLevelError,
    likely_level,
    load_native,
)

__all__ = [
    "NativeLibrary",
    "NativeUnavailableError",
    "Op",
    "UnknownLevelError",
    "likely_level",
    "load_native",
]
