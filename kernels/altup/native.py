"""Args of the native ops of alternating updates (altup.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

# Streams that an op holds the shares of at once.
LARGEST_STREAMS = 16
AltUpPredictArgs = structure("AltUpPredictArgs")
AltUpCorrectArgs = structure("AltUpCorrectArgs")
MagnitudeArgs = structure("MagnitudeArgs")
StreamMeanArgs = structure("StreamMeanArgs")
CutOffArgs = structure("CutOffArgs")
