"""What ranks do together in plain numpy, with all parts at hand: the native ops' oracle.

Shape letters: N ranks, T tokens, E width, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.ranks.shares import share_of

Ints = NDArray[np.int64]
Parts = Sequence[NDArray[np.float32]]


def summed(parts: Parts, before: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """The parts [T, E] of all ranks, added up in float32 from the first to the last; then to what was there
    `before`.
    """
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total if before is None else before + total


class Rows(NamedTuple):
    """Rows of a step that are computed together: where they begin among all, the first sequence that has some
    of them, and of it and those behind it the starts [S + 1] among these rows, and context lengths [S].
    """

    begin: int
    first_sequence: int
    query_starts: list[int]
    context_lens: list[int]


def micro_batch(query_starts: Ints, context_lens: Ints, index: int, count: int) -> Rows:
    """One of `count` runs of the rows of a step, as even as can be: what a sequence has in later ones is no
    part of its context yet.
    """
    rows = share_of(int(query_starts[-1]), index, count)
    own, first = Rows(rows.start, -1, [0], []), -1
    for sequence, length in enumerate(context_lens):
        begin, end = query_starts[sequence], query_starts[sequence + 1]
        if end > rows.start and begin < rows.stop:
            first = sequence if first < 0 else first
            own.query_starts.append(int(min(end, rows.stop)) - rows.start)
            own.context_lens.append(int(length - max(0, end - rows.stop)))
    return own._replace(first_sequence=first)


def side_by_side(parts: Parts) -> NDArray[np.float32]:
    """Each rank's columns of logits -> [R, V]."""
    return np.concatenate(parts, axis=1)
