"""Which drafts a step's draws confirm, found out on the device, so that the next step can be queued before
the host has read any of them. `verification.confirmed` says the same of each sequence on the host.

Shape letters: R rows of logits, M sequences that sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.runner.inputs import StepInputs
from engine.runner.outcomes import LogitRows
from kernels.host import on_device

# Stands for the draft after a sequence's last row: no draw equals it.
_NO_DRAFT = -1


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """All on the device."""

    first_rows: Tensor  # [M]
    # Row of the last token that each sequence emits: a draft's successor, or what was drawn in its place.
    last_rows: Tensor  # [M]
    num_rejected: Tensor  # [M] drafts
    # Whether the row's token is part of its sequence.
    emitted: Tensor  # [R] bool


def accept(tokens: Tensor, inputs: StepInputs, rows: LogitRows) -> Accepted:
    """Compares tokens [R] with the drafts that follow the rows."""
    starts = np.array(rows.starts, np.int64)
    drafts = np.full(rows.tokens.size, _NO_DRAFT, np.int64)
    for member, start in zip(rows.members, rows.starts, strict=False):
        found = inputs.scheduled[member].draft_token_ids
        drafts[start : start + len(found)] = found
    owners = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    count, members = drafts.size, starts.size - 1
    there = on_device(np.concatenate((drafts, owners, np.arange(count), starts)), tokens.device)
    following, owner, number, bounds = torch.split(there, [count, count, count, members + 1])
    first, end = bounds[:-1], bounds[1:]
    # The first row at or after each whose draw differs; that of a sequence's last row always does.
    differs = torch.where(tokens == following, count, number)
    last = torch.cummin(differs.flip(0), 0).values.flip(0).index_select(0, first)
    return Accepted(
        first_rows=first,
        last_rows=last,
        num_rejected=end - 1 - last,
        emitted=number <= last.index_select(0, owner),
    )
