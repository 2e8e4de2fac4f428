"""The sequence table of a GPU: block tables and last tokens are kept on the device, too, so that a step can
be launched before the host knows what the step before it drew.

Shape letters: N slots, C block columns, S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.runner.sequence_table import SequenceTable
from engine.types import NewSequence
from kernels.adapters.rows import NO_ADAPTER
from kernels.host import on_device


class DeviceTable(SequenceTable):
    """A sequence table whose first `num_rows` slots are mirrored. One more row stands for rows that pad a
    batch: its blocks are the spare one.
    """

    def __init__(
        self, *, num_rows: int, num_columns: int, spare_block: int, device: torch.device, **options: Any
    ) -> None:
        super().__init__(device=device, **options)
        self.num_rows = num_rows
        self.device = device
        self.device_blocks = torch.full(
            (num_rows + 1, num_columns), spare_block, dtype=torch.int32, device=device
        )  # [N + 1, C]
        self.last_tokens = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # [N + 1]
        # Drafts of the last step that were rejected, where it had any; and how many it had, while the host
        # has not read what became of them.
        self.num_rejected = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)  # [N + 1]
        self.unread_drafts = np.zeros(num_rows, np.int64)  # [N]
        # Slots of the sequences' adapters.
        self.device_adapters = torch.full((num_rows + 1,), NO_ADAPTER, dtype=torch.int64, device=device)
        self._sent_adapters = np.full(num_rows, NO_ADAPTER, np.int64)  # [N]
        self._changed_adapters: set[int] = set()
        self._changes: list[tuple[int, int, tuple[int, ...]]] = []

    @property
    def pad_row(self) -> int:
        """The row for padding."""
        return self.num_rows

    def add(self, new: NewSequence, *, forked: bool = False) -> None:
        super().add(new, forked=forked)
        slot = self.states[new.sequence_id].slot
        if slot < self.num_rows:
            self.unread_drafts[slot] = 0
            if self.adapters[slot] != self._sent_adapters[slot]:
                self._sent_adapters[slot] = self.adapters[slot]
                self._changed_adapters.add(slot)

    def add_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        if block_ids and slot < self.num_rows:
            self._changes.append((slot, int(self.num_blocks[slot]), block_ids))
        super().add_blocks(slot, block_ids)

    def flush(self) -> None:
        """Queues what changed in block tables, and of adapters, to the device."""
        if self._changed_adapters:
            slots = np.array(sorted(self._changed_adapters), np.int64)
            self._changed_adapters.clear()
            there = on_device(np.stack((slots, self._sent_adapters[slots])), self.device)
            self.device_adapters.index_put_((there[0],), there[1])
        if not self._changes:
            return
        total = sum(len(block_ids) for _, _, block_ids in self._changes)
        changes = np.empty((3, total), np.int64)
        at = 0
        for slot, column, block_ids in self._changes:
            end = at + len(block_ids)
            changes[0, at:end] = slot
            changes[1, at:end] = np.arange(column, column + len(block_ids))
            changes[2, at:end] = block_ids
            at = end
        self._changes.clear()
        # A slot that was given to another sequence in between comes twice: what came last counts.
        _, last = np.unique((changes[0] * self.device_blocks.shape[1] + changes[1])[::-1], return_index=True)
        rows, columns, blocks = on_device(np.ascontiguousarray(changes[:, total - 1 - last]), self.device)
        self.device_blocks.index_put_((rows, columns), blocks.int())

    def set_last_tokens(self, slots: Tensor, tokens: Tensor) -> None:
        """The device drew tokens [S] for slots [S]."""
        self.last_tokens.index_copy_(0, slots, tokens)

    def set_rejected(self, slots: Tensor, num_rejected: Tensor) -> None:
        """So many drafts of slots [S] were rejected."""
        self.num_rejected.index_copy_(0, slots, num_rejected)
