"""Decode steps of a ladder of sizes, captured once: what goes in and out lies in buffers that never move.

A row is a token of a slot at a position: the last one of a sequence, or a draft behind it. Drafts are rows of
the same slot, which see each other's keys since a layer writes all before it looks at any. A step takes the
next size at or above its rows. Rows that pad it read token 0, belong to no sequence, write to the spare block
and look at themselves alone.

Shape letters: B rows, C block columns, E hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model.decoder import Decoder
from engine.runner.cuda.device_table import DeviceTable
from engine.runner.cuda.recorder import GraphRecorder, Recording
from engine.runner.cuda.staging import Staging
from kernels.attention.backends import CapturedAttention
from kernels.attention.ragged import DecodeBatch
from kernels.paged_cache.channel_cache import captured_keys, channel_caches, share_step
from kernels.paged_cache.store import LayerCache

# Rows of the staged inputs.
_TOKENS, _POSITIONS, _SLOTS, _BEHIND_DRAFTS = range(4)
NUM_INPUTS = 4
# A token that only the device knows yet.
UNREAD = -1


def ladder(
    max_sequences: int, asked: Sequence[int] = (), multiple: int = 1, *, most_drafts: int = 0
) -> tuple[int, ...]:
    """Sizes to capture, ascending: `asked`, or 1, 2, 4, then multiples of 8, and with drafts multiples of
    max_sequences; each rounded up to `multiple`, none above what holds max_sequences with all their drafts.
    """
    most_rows = max_sequences * (1 + most_drafts)
    beyond = range(max_sequences, most_rows + 1, max_sequences)
    sizes = asked or (1, 2, 4, *range(8, max_sequences, 8), *beyond)
    top = -(-most_rows // multiple) * multiple
    return tuple(sorted({min(-(-size // multiple) * multiple, top) for size in sizes}))


class DecodeGraphs:
    """The captured steps of one model over one cache."""

    def __init__(
        self,
        model: Decoder,
        attention: CapturedAttention,
        caches: list[LayerCache],
        table: DeviceTable,
        *,
        sizes: Sequence[int],
        block_size: int,
    ) -> None:
        self.model, self.attention, self.caches, self.table = model, attention, caches, table
        self.sizes = sorted(sizes)
        self.block_size = block_size
        device, rows = model.device, self.sizes[-1]
        self.inputs = Staging(NUM_INPUTS, rows, device)
        self.context_lens = torch.ones(rows, dtype=torch.int32, device=device)
        columns = table.device_blocks.shape[1]
        self.block_tables = torch.zeros(rows, columns, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(rows, model.spec.hidden_size, dtype=model.embedding.dtype, device=device)
        # Kept here, because graphs hold addresses of these tensors and not the tensors.
        self._steps = attention.plan_decode(
            DecodeBatch(
                context_lens=self.context_lens,
                block_tables=self.block_tables,
                block_size=block_size,
                max_context_len=model.max_model_len,
            )
        )
        self._recordings: dict[int, Recording] = {}

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder, progress: Callable[[float], None] = lambda part: None) -> None:
        """Captures all sizes, the largest first, whose memory the others then share."""
        for done, rows in enumerate(reversed(self.sizes)):
            self._fill(rows, *(np.zeros(0, np.int64) for _ in range(NUM_INPUTS)))
            self._recordings[rows] = recorder.record(self._work(rows))
            progress((done + 1) / len(self.sizes))

    def size_for(self, num_rows: int) -> int | None:
        """The smallest captured size that holds so many rows."""
        index = bisect_left(self.sizes, num_rows)
        return self.sizes[index] if index < len(self.sizes) else None

    def run(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: NDArray[np.int64],
        behind_drafts: NDArray[np.int64],
    ) -> tuple[Tensor, Tensor]:
        """Queues one step of rows [R] of `slots` at `positions`. Tokens are UNREAD where the device drew them
        in the step before; `behind_drafts` is 1 where that step verifies drafts whose fate only the device
        knows: as many as were rejected, the row lies before its position.

        Returns hidden states [B, E] and slots [R] on the device; both stay valid until the next step.
        """
        size = self.size_for(tokens.size)
        assert size is not None, f"{tokens.size} rows are more than any graph has"
        self._fill(size, tokens, positions, slots, behind_drafts)
        self._recordings[size].replay()
        return self.hidden[:size], self.inputs.view(size)[_SLOTS, : tokens.size]

    def _fill(self, size: int, *given: NDArray[np.int64]) -> None:
        rows = self.inputs.begin(size)
        count = given[0].size
        for index, values in enumerate(given):
            rows[index, :count] = values
        rows[:, count:] = 0
        rows[_SLOTS, count:] = self.table.pad_row
        self.inputs.send(size)

    def _work(self, rows: int) -> Callable[[], None]:
        """One step of so many rows, from the staged inputs to the hidden states."""
        staged = self.inputs.view(rows)
        context_lens, block_tables = self.context_lens[:rows], self.block_tables[:rows]
        table, model, attention, block_size = self.table, self.model, self.attention, self.block_size
        plan, by_channel = self._steps.first(rows), list(channel_caches(self.caches))

        def work() -> None:
            slots = staged[_SLOTS]
            going_back = staged[_BEHIND_DRAFTS] * table.num_rejected.index_select(0, slots)
            positions = staged[_POSITIONS] - going_back
            context_lens.copy_(positions + 1)
            torch.index_select(table.device_blocks, 0, slots, out=block_tables)
            last = table.last_tokens.index_select(0, slots)
            tokens = torch.where(staged[_TOKENS] == UNREAD, last, staged[_TOKENS])
            blocks = block_tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
            indices = blocks * block_size + positions % block_size
            attention.begin(plan)
            if by_channel:
                num_blocks = by_channel[0].keys.shape[0]
                # No captured row has hidden blocks.
                keys = captured_keys(
                    2 * slots, positions, blocks, block_size=block_size, num_blocks=num_blocks
                )
                share_step(by_channel, keys)
            adapters = table.device_adapters.index_select(0, slots) if model.num_adapter_slots else None
            hidden = model.run(
                tokens, positions, indices, self.caches, attention, plan, adapters, cut_plans=(plan, None)
            )
            self.hidden[:rows].copy_(hidden)

        return work
