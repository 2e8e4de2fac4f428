"""Gates of feed-forward layers."""

from engine.kernels.activation.reference import GATES, gate

__all__ = ["GATES", "gate"]
