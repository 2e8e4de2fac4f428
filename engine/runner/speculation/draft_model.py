"""A small model of the same vocabulary proposes by running ahead.

It keeps keys and values of its own under the block ids of the target, and reads a sequence only when it is
asked for drafts: the first forward of a proposal reads what is new since the last one together with the last
token, so that `n` drafts take `n` forwards, and a sequence that does not speculate costs nothing. Contents of
a block depend on its tokens alone, so sequences that share a prefix write the same. Positions that have no
block yet use scratch blocks. It draws with the same noise as the verification will, so a draft is accepted
whenever both models' distributions lead to the same token.

Shape letters: S sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from engine.model.back_end import Model
from engine.model.forward_batch import ForwardBatch
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.sampling.table import sample
from kernels.attention.ragged import RaggedBatch
from kernels.host import Device, Values, on_device
from kernels.linear.rows import ROW_MULTIPLE
from kernels.sampling.rows import SamplingRows

if TYPE_CHECKING:
    from kernels.attention.backends import AttentionBackend

# Tokens that are read in one forward, so that a long prompt does not hold up everybody's next step.
MAX_READ_TOKENS = 512


class DraftModel:
    """See Drafter. The draft and its cache, whose last blocks are scratch."""

    looks_up = False

    def __init__(
        self, model: Model, attention: AttentionBackend | None, storage: KvStorage, *, num_scratch_blocks: int
    ) -> None:
        self.model = model
        self.attention = attention
        self.storage = storage
        self.first_scratch = storage.num_blocks - num_scratch_blocks
        self.num_scratch_blocks = num_scratch_blocks

    def propose(
        self, states: Sequence[SequenceState], counts: Sequence[int], table: SequenceTable
    ) -> list[tuple[int, ...]]:
        """Up to `counts` tokens after each sequence's last token; fewer where a grammar ends, none while the
        sequence's text is still being read.
        """
        per_sequence = -(-max(counts) // self.storage.block_size) + 1
        fitting = self.num_scratch_blocks // per_sequence
        proposals: list[list[int]] = [[] for _ in states]
        tails = _Tails(states[:fitting], table, self.first_scratch, per_sequence, self.storage.block_size)
        live, spans = tails.to_read(MAX_READ_TOKENS)
        # Drafts move the matchers that are there; afterwards these are where those were.
        matchers = [None if each.matcher is None else each.matcher.copy() for each in states]
        try:
            step = 0
            while spans.size:
                drawn = self._step(tails, live, spans, step, proposals, table)
                # Those whose text is read, and whose draw the grammar takes, go on.
                going_on = []
                for index, token in zip(live.tolist(), drawn.tolist(), strict=True):
                    if not tails.is_read[index] or not _accepts(states[index], token):
                        continue
                    proposals[index].append(token)
                    if len(proposals[index]) < counts[index]:
                        going_on.append(index)
                step += 1
                live = np.array(going_on, np.int64)
                spans = np.ones(live.size, np.int64)
        finally:
            for state, matcher, drafts in zip(states, matchers, proposals, strict=True):
                state.matcher = matcher
                state.draft.num_proposed = len(drafts)
        return [tuple(drafts) for drafts in proposals]

    def ended(self, state: SequenceState, output: NDArray[np.int64]) -> None:
        """What was read of it lies under its blocks, and goes with them."""

    def learn(self, seconds: float) -> None:
        """Nothing is learnt."""

    def _step(
        self,
        tails: _Tails,
        live: NDArray[np.int64],
        spans: NDArray[np.int64],
        step: int,
        proposals: list[list[int]],
        table: SequenceTable,
    ) -> NDArray[np.int64]:
        """One forward of `spans` tokens of each live sequence; the tokens drawn after them [S]."""
        device = self.model.device
        batch = tails.batch(live, spans, proposals, spare_slot=self.storage.spare_slot, device=device)
        hidden = self.model.forward(batch, self.storage.layers, self.attention)
        ends = np.cumsum(spans) - 1
        logits = self.model.logits_of(hidden, ends)
        drafts = [proposals[index] for index in live.tolist()]
        guided, masks = _masks([tails.states[index] for index in live.tolist()], table)
        drawn = sample(
            logits,
            table.sampling,
            SamplingRows(
                slots=tails.slots[live],
                positions=tails.outputs[live] + step,
                draft_rows=np.array([row for row, tokens in enumerate(drafts) for _ in tokens], np.int64),
                draft_tokens=np.array([token for tokens in drafts for token in tokens], np.int64),
                grammar_rows=guided,
                grammar_masks=masks,
            ),
        )
        return drawn.tokens


def _accepts(state: SequenceState, token: int) -> bool:
    return state.matcher is None or state.matcher.try_accept(token)


def _masks(
    states: list[SequenceState], table: SequenceTable
) -> tuple[NDArray[np.int64], NDArray[np.int32] | None]:
    """Rows under a grammar, and their masks; a grammar that breaks here is found out later."""
    guided = {row: state.matcher for row, state in enumerate(states) if state.matcher is not None}
    if not guided:
        return np.array([], np.int64), None
    filled = table.grammar.fill([(matcher, ()) for matcher in guided.values()]).result()
    return np.array(list(guided), np.int64), filled.masks


class _Tails:
    """Where each sequence ends, and the blocks in which its drafts live."""

    def __init__(
        self,
        states: Sequence[SequenceState],
        table: SequenceTable,
        first_scratch: int,
        per_sequence: int,
        block_size: int,
    ) -> None:
        self.states = states
        self.block_size = block_size
        self.table = table
        self.slots = np.array([state.slot for state in states], np.int64)
        self.lengths = table.num_tokens[self.slots]  # [S] tokens known
        self.outputs = self.lengths - np.array([state.num_prompt for state in states], np.int64)
        owned = table.num_blocks[self.slots]
        width = int(owned.max()) + per_sequence
        self.tables = np.zeros((len(states), width), np.int64)
        for row, count in enumerate(owned.tolist()):
            self.tables[row, :count] = table.blocks[self.slots[row], :count]
            scratch = first_scratch + row * per_sequence + np.arange(per_sequence)
            self.tables[row, count : count + per_sequence] = scratch
        self.owned = owned * block_size  # [S] positions in blocks of the sequence's own
        self.starts = np.zeros(len(states), np.int64)  # [S] first position of the next forward
        self.is_read = np.zeros(len(states), np.bool_)

    def to_read(self, budget: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sequences whose new tokens are read now, and how many of each, up to `budget` in all. The last one
        lies beyond the blocks of its own where the target has not computed it yet.
        """
        live, spans = [], []
        for row, state in enumerate(self.states):
            start = min(state.draft.num_read, int(self.lengths[row]) - 1)
            span = min(int(self.lengths[row]) - start, budget)
            if not span:
                break
            budget -= span
            self.starts[row] = start
            self.is_read[row] = start + span == self.lengths[row]
            state.draft.num_known, state.draft.num_owned = start + span, int(self.owned[row])
            state.draft.num_read = min(start + span, int(self.owned[row]))
            live.append(row)
            spans.append(span)
        return np.array(live, np.int64), np.array(spans, np.int64)

    def batch(
        self,
        live: NDArray[np.int64],
        spans: NDArray[np.int64],
        proposals: list[list[int]],
        *,
        spare_slot: int,
        device: Device,
    ) -> ForwardBatch:
        """`spans` tokens of each live sequence from its start on; moves the starts along."""
        owner = np.repeat(live, spans)
        query_starts = np.concatenate(([0], np.cumsum(spans)))
        within = np.arange(owner.size) - np.repeat(query_starts[:-1], spans)
        positions = self.starts[owner] + within
        token_ids = self.table.tokens[self.slots[owner], np.minimum(positions, self.lengths[owner] - 1)]
        for number, (row, start) in enumerate(zip(live.tolist(), query_starts.tolist(), strict=False)):
            if self.starts[row] >= self.lengths[row]:
                assert spans[number] == 1
                token_ids[start] = proposals[row][-1]
        slots = self.tables[owner, positions // self.block_size] * self.block_size
        slots = slots + positions % self.block_size
        self.starts[live] += spans
        padding = -owner.size % ROW_MULTIPLE

        def padded(values: NDArray[np.int64], fill: int) -> Values:
            return on_device(np.pad(values, (0, padding), constant_values=fill), device)

        return ForwardBatch(
            token_ids=padded(token_ids, 0),
            positions=padded(positions, 0),
            slots=padded(slots, spare_slot),
            ragged=RaggedBatch(
                query_starts=query_starts,
                context_lens=self.starts[live],
                block_tables=self.tables[live],
                block_size=self.block_size,
            ),
        )
