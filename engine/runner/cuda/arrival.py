"""What a step drew on the device, until the host has it.

Shape letters: R rows that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.staging import Mark
from engine.runner.outcomes import Sampled
from engine.types import TokenLogprobs
from kernels.sampling.rows import Drawn


@dataclass(kw_only=True)
class LogprobsOnTheWay:
    """Log-probabilities of some rows, being copied to the host."""

    # Row, and number of alternatives that were asked for.
    rows: list[tuple[int, int]]
    chosen: Tensor  # [rows] on the host
    ids: Tensor  # [rows, most alternatives]
    values: Tensor


class DeviceArrival:
    """See Arrival."""

    def __init__(self, step: Sampled, table: DeviceTable, mark: Mark) -> None:
        self._step, self._table, self._mark = step, table, mark
        # Tokens, whether logits were finite, whether anything was allowed: [3, R] on the host after the mark.
        self.drawn: Tensor | None = None
        self.reports: LogprobsOnTheWay | None = None

    def wait(self) -> None:
        """Takes the tokens in, and into the table where every sequence has one. They count for a sequence
        only while it is the same one: slots change hands while steps are on their way.
        """
        self._mark.wait()
        if self.drawn is None:
            return
        step, table = self._step, self._table
        tokens, finite, allowed = self.drawn.numpy()
        inputs, rows = step.inputs, step.rows
        alive = np.array([inputs.is_alive(member, table) for member in rows.members], np.bool_)
        slots = rows.member_slots[alive]
        table.num_unread[slots] -= 1
        # Those of a step that was launched since are still on their way.
        table.unread_drafts[slots[table.num_unread[slots] == 0]] = 0
        if rows.one_each and alive.any():
            table.append_one_each(slots, tokens[alive])
        step.appended = rows.one_each
        step.drawn = Drawn(
            tokens=tokens, finite=finite.astype(np.bool_), allowed=allowed.astype(np.bool_), processed=None
        )

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """See Arrival."""
        found, drawn = self.reports, self._step.drawn
        if found is None or drawn is None:
            return {}
        parts = zip(found.rows, found.chosen.tolist(), found.ids.tolist(), found.values.tolist(), strict=True)
        return {
            row: TokenLogprobs(int(drawn.tokens[row]), chosen, tuple(ids[:count]), tuple(values[:count]))
            for (row, count), chosen, ids, values in parts
        }
