"""Args of the native op that makes what layers read of a second embedding (per_layer.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

PerLayerArgs = structure("PerLayerArgs")
