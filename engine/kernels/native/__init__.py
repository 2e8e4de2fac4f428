"""Kernels in C++ for CPUs, built on first use. See DESIGN.md."""

from engine.kernels.native.library import NativeLibrary, NativeUnavailableError, Op, load_native

__all__ = ["NativeLibrary", "NativeUnavailableError", "Op", "load_native"]
