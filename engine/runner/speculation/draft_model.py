"""A small model of the same vocabulary proposes by running ahead.

It keeps keys and values of its own under the block ids of the target: every forward of the target is
accompanied by one of the draft over the same tokens, so prefix hits, forks, copies and offload hold for both.
To propose, it decodes `num_drafts` tokens one after another; positions that have no block yet use scratch
blocks. It draws with the same noise as the verification will, so a draft is accepted whenever both models'
distributions lead to the same token.

Shape letters: S sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine.kernels.attention import AttentionBackend, RaggedBatch
from engine.kernels.linear import ROW_MULTIPLE
from engine.model.forward_batch import ForwardBatch
from engine.model.loading import Model
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.sampling.grammar import GrammarError
from engine.sampling.sampler import SamplingRows, sample


class DraftModel:
    """The draft and its cache, whose last blocks are scratch."""

    def __init__(
        self, model: Model, attention: AttentionBackend, storage: KvStorage, *, num_scratch_blocks: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        self.first_scratch = storage.num_blocks - num_scratch_blocks
        self.num_scratch_blocks = num_scratch_blocks

    def observe(self, batch: ForwardBatch, target_spare_slot: int) -> None:
        """Computes keys and values of the tokens that the target just computed."""
        slots = torch.where(batch.slots == target_spare_slot, self.storage.spare_slot, batch.slots)
        own = ForwardBatch(
            token_ids=batch.token_ids, positions=batch.positions, slots=slots, ragged=batch.ragged
        )
        self.model.forward(own, self.storage.layers, self.attention)

    def propose(
        self, states: list[SequenceState], table: SequenceTable, num_drafts: int
    ) -> list[tuple[int, ...]]:
        """Up to num_drafts tokens after each sequence's last token; fewer where a grammar ends."""
        per_sequence = -(-num_drafts // self.storage.block_size) + 1
        room = self.num_scratch_blocks // per_sequence
        proposals: list[list[int]] = [[] for _ in states[:room]]
        rows = _Tails(states[:room], table, self.first_scratch, per_sequence, self.storage.block_size)
        live = np.arange(len(proposals))
        latest = rows.last_tokens
        try:
            for step in range(num_drafts):
                if not live.size:
                    break
                drawn = self._step(rows, live, latest, step, proposals, table)
                latest = drawn
                for index in live.tolist():
                    token = int(drawn[index])
                    matcher = states[index].matcher
                    if matcher is not None and not matcher.try_accept(token):
                        continue
                    proposals[index].append(token)
                live = live[[len(proposals[index]) == step + 1 for index in live.tolist()]]
        finally:
            for state, drafts in zip(states, proposals, strict=False):
                if state.matcher is not None:
                    state.matcher.rollback(len(drafts))
        return [tuple(drafts) for drafts in proposals] + [()] * (len(states) - len(proposals))

    def _step(
        self,
        rows: _Tails,
        live: NDArray[np.int64],
        latest: NDArray[np.int64],
        step: int,
        proposals: list[list[int]],
        table: SequenceTable,
    ) -> NDArray[np.int64]:
        """One decode of the live sequences; the drawn tokens [S] by sequence (others keep their latest)."""
        device = self.model.device
        batch = rows.batch(live, latest, step, spare_slot=self.storage.spare_slot, device=device)
        hidden = self.model.forward(batch, self.storage.layers, self.attention)
        logits = self.model.logits(hidden)[: live.size]
        drafts = [proposals[index] for index in live.tolist()]
        masks = np.full((live.size, table.grammar.mask_width), -1, np.int32)
        guided = []
        for row, index in enumerate(live.tolist()):
            matcher = rows.states[index].matcher
            if matcher is not None:
                guided.append(row)
                try:
                    matcher.fill(masks[row : row + 1], ())
                except GrammarError:
                    masks[row] = -1
        draft_rows = [row for row, tokens in enumerate(drafts) for _ in tokens]
        drawn = sample(
            logits,
            table.sampling,
            SamplingRows(
                slots=rows.slots[live],
                positions=rows.outputs[live] + step,
                draft_rows=np.array(draft_rows, np.int64),
                draft_tokens=np.array([token for tokens in drafts for token in tokens], np.int64),
                grammar_rows=np.array(guided, np.int64),
                grammar_masks=masks[guided] if guided else None,
            ),
        )
        result = latest.copy()
        result[live] = drawn.tokens
        return result


class _Tails:
    """Where each sequence ends, and the blocks in which its drafts live."""

    def __init__(
        self,
        states: list[SequenceState],
        table: SequenceTable,
        first_scratch: int,
        per_sequence: int,
        block_size: int,
    ) -> None:
        self.states = states
        self.block_size = block_size
        self.slots = np.array([state.slot for state in states], np.int64)
        self.lengths = table.num_tokens[self.slots]  # [S] tokens known, the last of them not computed yet
        self.outputs = self.lengths - np.array([state.num_prompt for state in states], np.int64)
        self.last_tokens = table.tokens[self.slots, self.lengths - 1]
        owned = table.num_blocks[self.slots]
        width = int(owned.max()) + per_sequence
        self.tables = np.zeros((len(states), width), np.int64)
        columns = np.arange(width)
        for row, count in enumerate(owned.tolist()):
            self.tables[row, :count] = table.blocks[self.slots[row], :count]
            scratch = first_scratch + row * per_sequence + np.arange(per_sequence)
            self.tables[row, count : count + per_sequence] = scratch
        self.columns = columns

    def batch(
        self,
        live: NDArray[np.int64],
        latest: NDArray[np.int64],
        step: int,
        *,
        spare_slot: int,
        device: torch.device,
    ) -> ForwardBatch:
        """One token per live sequence, at its end plus `step`."""
        positions = self.lengths[live] - 1 + step
        blocks = self.tables[live]
        slots = blocks[np.arange(live.size), positions // self.block_size] * self.block_size
        slots = slots + positions % self.block_size
        padding = -live.size % ROW_MULTIPLE

        def padded(values: NDArray[np.int64], fill: int) -> torch.Tensor:
            return torch.from_numpy(np.pad(values, (0, padding), constant_values=fill)).to(device)

        return ForwardBatch(
            token_ids=padded(latest[live], 0),
            positions=padded(positions, 0),
            slots=padded(slots, spare_slot),
            ragged=RaggedBatch(
                query_starts=np.arange(live.size + 1),
                context_lens=positions + 1,
                block_tables=blocks,
                block_size=self.block_size,
            ),
        )
