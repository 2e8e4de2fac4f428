"""Args of the native ops for layers with a state (recurrent.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

# kMostKeys of recurrent.h.
LARGEST_KEY = 512
# Values of ScanKind and RowGate.
SCANS = {"mamba2": 0, "delta": 1, "channels": 2}
GATES = {"silu": 0, "sigmoid": 1, "gelu_tanh": 2, "softplus": 3}
ShortConvolutionArgs = structure("ShortConvolutionArgs")
ScanInputsArgs = structure("ScanInputsArgs")
ScanArgs = structure("ScanArgs")
RgLruArgs = structure("RgLruArgs")
SelectiveScanArgs = structure("SelectiveScanArgs")
GatedRowArgs = structure("GatedRowArgs")
