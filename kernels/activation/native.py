"""Args of the native activations (activation.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

# Values of ActivationKind.
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "clamped_swiglu": 3, "relu2": 4, "xielu": 5, "relu": 6}
ActivationArgs = structure("ActivationArgs")
SoftCapArgs = structure("SoftCapArgs")
