"""Where the states of a step's sequences lie, as host arrays.

Shape letters: S sequences, P snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class StateRows:
    """One step's states. A row that begins at position 0 begins with zeros."""

    slots: NDArray[np.int64]  # [S]
    # Snapshots that are left on the way: first one of each sequence, and the end.
    snapshot_starts: NDArray[np.int64]  # [S + 1]
    # Index on the token axis of the last token that each holds, and where it goes.
    snapshot_rows: NDArray[np.int64]  # [P]
    snapshot_slots: NDArray[np.int64]  # [P]

    @classmethod
    def of(
        cls,
        slots: NDArray[np.int64],
        starts: NDArray[np.int64],
        query_starts: NDArray[np.int64],
        snapshots: Sequence[Sequence[tuple[int, int]]],
    ) -> StateRows:
        """`starts` [S] are positions of first tokens, `query_starts` their places on the token axis; of each
        sequence `snapshots` are (tokens that it holds, slot), ascending.
        """
        counts = np.array([0, *map(len, snapshots)], np.int64)
        flat = np.array([pair for each in snapshots for pair in each], np.int64).reshape(-1, 2)
        owners = np.repeat(np.arange(len(snapshots)), counts[1:])
        return cls(
            slots=np.ascontiguousarray(slots),
            snapshot_starts=np.cumsum(counts),
            snapshot_rows=query_starts[owners] + flat[:, 0] - 1 - starts[owners],
            snapshot_slots=np.ascontiguousarray(flat[:, 1]),
        )
