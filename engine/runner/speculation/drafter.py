"""What the proposer asks of whatever drafts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.runner.inputs import StepInputs
from engine.runner.sequence_table import SequenceState, SequenceTable


class Drafter(Protocol):
    """One way to guess how texts go on. What it guesses is verified, so it may be wrong and never changes an
    output. What has a body here is true of whoever keeps nothing of steps or of what has ended.
    """

    # Whether each sequence is looked up by itself, which costs little, and finds something or not; else all
    # that are asked share forwards, one for each further draft.
    looks_up: bool
    # Whether it has to see steps before it is asked.
    keeps_steps: bool = False
    # Rows that a sequence's step computes beside its drafts, by how many of these: those that come with the
    # first one, further ones with the second.
    rows_beside: Sequence[int] = ()

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """Up to `counts` [S] tokens after the last one of each sequence; all of theirs are in the table."""

    def saw(self, inputs: StepInputs, table: SequenceTable) -> None:
        """A step was computed, and the tokens that it drew are in the table. Its hidden states are there
        until the next one.
        """
        return

    def num_unread(self, state: SequenceState, table: SequenceTable) -> int:
        """Tokens that are read before the first draft; 0 where nothing can be drafted."""
        return 1

    def drafts_after(self, state: SequenceState, text: NDArray[np.int64], count: int) -> tuple[int, ...]:
        """What would have been looked up at the end of the first part of a sequence's text [L], which is no
        shorter than the last time.
        """
        return ()

    def ended(self, state: SequenceState, output: NDArray[np.int64]) -> None:
        """A sequence leaves the batch, with so much of its output [L]."""
        return

    def learn(self, seconds: float) -> None:
        """May take so long to make use of what has ended."""
        return
