"""What ranks do together in plain numpy, with all parts at hand: the native ops' oracle.

Shape letters: N ranks, T tokens, E width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Parts = Sequence[NDArray[np.float32]]


def summed(parts: Parts, before: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The parts [T, E] of all ranks, added up in float32 from the first to the last; then to what was there
    `before`.
    """
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total if before is None else before + total


def side_by_side(parts: Parts) -> NDArray[np.float32]:
    """Each rank's columns of logits -> [R, V]."""
    return np.concatenate(parts, axis=1)
