"""Root-mean-square norm."""

from engine.kernels.norm.reference import rms_norm

__all__ = ["rms_norm"]
