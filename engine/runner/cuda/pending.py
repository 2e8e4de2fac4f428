"""A step that was launched on the device, and what the host must remember until its tokens come back.

Shape letters: R rows that sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from engine.runner.cuda.staging import Mark
from engine.runner.sequence_table import SequenceState
from engine.types import SequenceResult, StepResult


@dataclass(kw_only=True)
class LogprobsOnTheWay:
    """Log-probabilities of some rows, being copied to the host."""

    # Row, and number of alternatives that were asked for.
    rows: list[tuple[int, int]]
    chosen: Tensor  # [rows] on the host
    ids: Tensor  # [rows, most alternatives]
    values: Tensor


@dataclass(kw_only=True, eq=False)
class DeviceStep:
    """A launched step; `wait` lets the runner read it."""

    step_id: int
    started_s: float
    # Results that were known at launch.
    known: list[SequenceResult]
    read: Callable[[DeviceStep], StepResult]
    sequence_ids: list[int] = field(default_factory=list)  # [R]
    states: list[SequenceState] = field(default_factory=list)  # [R]
    slots: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # [R]
    # Tokens, whether logits were finite, whether anything was allowed: [3, R] on the host after `mark`.
    drawn: Tensor | None = None
    mark: Mark | None = None
    guided: bool = False
    grammar_problems: dict[int, str] = field(default_factory=dict)
    grammar_s: float = 0.0
    logprobs: LogprobsOnTheWay | None = None
    result: StepResult | None = None
    error: Exception | None = None

    def wait(self) -> StepResult:
        """See PendingStep."""
        return self.read(self)
