"""Rotary position embedding."""

from engine.kernels.rope.reference import rotate

__all__ = ["rotate"]
