"""What an engine tells of experts that lie on several ranks."""

from __future__ import annotations

import msgspec


class ExpertSpread(msgspec.Struct, frozen=True, kw_only=True):
    """How rows are spread over the ranks, and what was done about it since the engine started."""

    # Rows of the rank that has most, over the mean of all ranks, of all layers together.
    imbalance: float
    # Experts that have changed ranks.
    num_moves: int
