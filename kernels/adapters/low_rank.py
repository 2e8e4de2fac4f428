"""One adapter's change of one linear layer. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class LowRankChange:
    """x becomes x W^T + (x down^T) up^T; the adapter's scale is in `up`."""

    down: NDArray[np.float32]  # [rank, inputs]
    up: NDArray[np.float32]  # [outputs, rank]

    @property
    def rank(self) -> int:
        """Inner dimensions."""
        return int(self.down.shape[0])
