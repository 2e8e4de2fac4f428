"""The runner's own state of every live sequence: tokens, block tables, grammar, as arrays by slot.

The core's plans name sequences by id and never repeat their tokens; the table appends what was sampled.
Arrays grow by doubling, in slots and in columns.

Shape letters: N slots, L token columns, C block columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.pooling import PoolingParams
from contract.thinking import Thought
from engine.model.kv_scorer import KvScorer
from engine.runner.forgotten.meter import ForgottenKeys
from engine.runner.forgotten.votes import Votes
from engine.runner.speculation.branches import BranchRoom
from engine.runner.speculation.progress import DraftProgress
from engine.sampling.grammar import GrammarEngine, GrammarError, Matcher
from engine.sampling.table import SamplingTable, problem_with
from engine.sampling.thinking import ThinkingMatcher
from engine.types import ChosenTokens, KeptBlocks, NewSequence, SamplingParams, SequenceResult
from kernels.host import Device


@dataclass(kw_only=True)
class SequenceState:
    """What is kept per sequence besides its rows in the arrays."""

    slot: int
    # Position of its first output token, below 0 where the sequence has left that.
    num_prompt: int
    sampling: SamplingParams
    matcher: Matcher | ThinkingMatcher | None = None
    # A thought with a budget that no matcher holds, and how many tokens of the output it has read.
    thought: Thought | None = None
    num_read: int = 0
    # Tenant, and salt of its prefixes.
    owner: tuple[str, bytes] = ("", b"")
    # Of a model that pools: what is asked for, and what of the text is pooled so far [E].
    pooling: PoolingParams | None = None
    pooled: NDArray[np.float32] | None = None
    # The blocks that its positions look at, where some are forgotten.
    kept: KeptBlocks | None = None
    # The others' keys, where it is measured what that loses.
    forgotten: ForgottenKeys | None = None
    # What its prompt's queries vote for, until all of them have.
    votes: Votes | None = None
    # Why the sequence cannot go on; it takes no further part in forwards.
    failure: str = ""

    @cached_property
    def draft(self) -> DraftProgress:
        """How its drafts fare, from the first that is asked for on."""
        return DraftProgress()


class SequenceTable:
    """All live sequences. Slots of released sequences serve new ones."""

    def __init__(
        self, *, vocab_size: int, max_model_len: int, device: Device, grammar: GrammarEngine
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.grammar = grammar
        self.sampling = SamplingTable(vocab_size, device)
        # From a step and its hidden states to outputs, of a model that pools.
        self.pool: Callable[[Any, Any], list[SequenceResult]] | None = None
        # What scores prompts' tokens, where the model has such.
        self.scorer: KvScorer | None = None
        # Where branches of sequences may be computed; None: nowhere.
        self.branch_room: BranchRoom | None = None
        self.states: dict[int, SequenceState] = {}
        # Those of them that think on a budget.
        self.thinking: dict[int, SequenceState] = {}
        self.tokens = np.zeros((0, 256), np.int64)  # [N, L]
        self.blocks = np.zeros((0, 16), np.int64)  # [N, C]
        self.num_tokens = np.zeros(0, np.int64)  # [N]
        self.num_blocks = np.zeros(0, np.int64)  # [N]
        # Slots of their adapters; -1 for the base model.
        self.adapters = np.zeros(0, np.int64)  # [N]
        # Where their states lie; -1 where the model has none.
        self.state_slots = np.zeros(0, np.int64)  # [N]
        # Steps that were launched and whose tokens of this slot are not here yet.
        self.num_unread = np.zeros(0, np.int64)  # [N]
        # A heap: the lowest come first, since only these have rooms for branches.
        self._free: list[int] = []

    def add(self, new: NewSequence, *, forked: bool = False) -> None:
        """Takes in a sequence. One that cannot run is kept with its `failure`. The grammar of a `forked` one
        comes from its parent.
        """
        ids = np.asarray(new.token_ids, np.int64)
        slot = self._take_slot(len(ids), len(new.block_ids))
        state = SequenceState(
            slot=slot,
            num_prompt=new.num_prompt_tokens,
            sampling=new.sampling,
            owner=(new.tenant, new.cache_salt),
            pooling=new.pooling,
            kept=new.kept,
            forgotten=ForgottenKeys() if new.kept is not None and new.kept.is_measured else None,
            votes=Votes(new.kept, new.fresh_block_ids) if isinstance(new.kept, ChosenTokens) else None,
        )
        self.states[new.sequence_id] = state
        self.tokens[slot, : ids.size] = ids
        self.num_tokens[slot] = ids.size
        self.num_blocks[slot] = self.num_unread[slot] = 0
        self.adapters[slot] = new.adapter_slot
        self.state_slots[slot] = new.state_slot
        self.add_blocks(slot, new.block_ids)
        state.failure = self._problem(new, ids)
        params = SamplingParams(max_tokens=1) if state.failure else new.sampling
        prompt, output = np.split(ids, [new.num_prompt_tokens])
        if new.left_token_ids:
            prompt, output = (np.asarray(part, np.int64) for part in new.text)
        self.sampling.put(slot, params, new.choice_index, prompt, output)
        if state.failure or (forked and new.grammar is not None):
            return
        matcher = None
        if new.grammar is not None:
            try:
                matcher = state.matcher = self.grammar.matcher(
                    new.grammar, output.tolist(), self._output_limit(new, prompt.size)
                )
            except GrammarError as error:
                state.failure = str(error)
                return
        budget = new.sampling.max_thinking_tokens
        if budget is None or new.thinking is None:
            return
        thought = Thought(new.thinking, budget, prompt[-1:].tolist(), has_grammar=matcher is not None)
        if matcher is not None or new.left_token_ids:
            state.matcher = ThinkingMatcher(thought, output.tolist(), matcher)
        else:
            state.thought = thought
        if matcher is None:
            self.thinking[new.sequence_id] = state

    def release(self, sequence_id: int) -> None:
        """Forgets a sequence; one that is unknown is ignored."""
        state = self.states.pop(sequence_id, None)
        self.thinking.pop(sequence_id, None)
        if state is not None:
            self.sampling.drop(state.slot)
            heappush(self._free, state.slot)

    def hold_thoughts(self, num_drawn: Callable[[int], int]) -> list[SequenceState]:
        """The thoughts that may reach their budget within the tokens that are drawn for them before they are
        looked at again, by id. The others need no masks, and those that are over need none any more.
        """
        reached = []
        for sequence_id, state in list(self.thinking.items()):
            if isinstance(state.matcher, ThinkingMatcher):
                if state.matcher.is_over:
                    del self.thinking[sequence_id]
                    state.matcher = None
                continue
            assert state.thought is not None, "it is among those that think"
            output = self._output(state, state.num_read)
            state.thought.read(output)
            state.num_read += len(output)
            if state.thought.is_over:
                del self.thinking[sequence_id]
                state.thought = None
            elif state.thought.num_free < num_drawn(sequence_id):
                reached.append(state)
        return reached

    def hold(self, state: SequenceState) -> None:
        """Holds a thought to its budget from here on; all of its tokens are here."""
        assert state.thought is not None, "as said by hold_thoughts"
        state.matcher, state.thought = ThinkingMatcher(state.thought, self._output(state)), None

    def fork(self, parent_id: int, child_id: int) -> None:
        """The child starts as a copy of the parent: tokens, grammar, counts and block table.

        When the plan also brings the child as a new sequence, that one's own tokens, block table and options
        stay: a beam differs from its parent in the last token.
        """
        parent, child = self.states[parent_id], self.states.get(child_id)
        if child is None:
            count, blocks = self.num_tokens[parent.slot], self.num_blocks[parent.slot]
            self.add(
                NewSequence(
                    sequence_id=child_id,
                    token_ids=tuple(self.tokens[parent.slot, :count].tolist()),
                    num_prompt_tokens=parent.num_prompt,
                    sampling=parent.sampling,
                    choice_index=int(self.sampling.options["choice"][parent.slot]),
                    grammar=None,
                    adapter="",
                    block_ids=tuple(self.blocks[parent.slot, :blocks].tolist()),
                    adapter_slot=int(self.adapters[parent.slot]),
                    tenant=parent.owner[0],
                    cache_salt=parent.owner[1],
                    kept=parent.kept,
                )
            )
            child = self.states[child_id]
            child.failure, child.forgotten = child.failure or parent.failure, deepcopy(parent.forgotten)
            if parent.thought is not None:
                child.thought, child.num_read = parent.thought.copy(), parent.num_read
                self.thinking[child_id] = child
        if parent.matcher is not None and not child.failure:
            child.matcher = parent.matcher.copy()
            theirs, ours = self._output(parent), self._output(child)
            pairs = zip(theirs, ours, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            try:
                child.matcher.rollback(len(theirs) - shared)
                child.matcher.accept(ours[shared:])
            except GrammarError as error:
                child.failure = str(error)

    def _output(self, state: SequenceState, start: int = 0) -> list[int]:
        begin, end = state.num_prompt + start, self.num_tokens[state.slot]
        found: list[int] = self.tokens[state.slot, begin:end].tolist()
        return found

    def add_blocks(self, slot: int, block_ids: tuple[int, ...]) -> None:
        """Appends to a block table."""
        if not block_ids:
            return
        start = int(self.num_blocks[slot])
        end = start + len(block_ids)
        if end > self.blocks.shape[1]:
            self.blocks = _widen(self.blocks, end)
        self.blocks[slot, start:end] = block_ids
        self.num_blocks[slot] = end

    def append(self, slot: int, tokens: tuple[int, ...]) -> None:
        """Appends sampled tokens."""
        start = int(self.num_tokens[slot])
        end = start + len(tokens)
        self.ensure_columns(end)
        self.tokens[slot, start:end] = tokens
        self.num_tokens[slot] = end

    def append_one_each(self, slots: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Appends one sampled token to each of several sequences."""
        ends = self.num_tokens[slots]
        self.ensure_columns(int(ends.max()) + 1)
        self.tokens[slots, ends] = tokens
        self.num_tokens[slots] = ends + 1

    def ensure_columns(self, num_tokens: int) -> None:
        """Makes room for sequences of num_tokens tokens."""
        if num_tokens > self.tokens.shape[1]:
            self.tokens = _widen(self.tokens, num_tokens)

    def _output_limit(self, new: NewSequence, num_prompt: int) -> int:
        """Output tokens within which a grammar is led to its end; 0 leaves it alone, where tokens are
        excluded that the end may need.
        """
        sampling = new.sampling
        if sampling.allowed_token_ids or -math.inf in sampling.logit_bias.values():
            return 0
        if new.kept is not None and (new.kept.num_positions or new.kept.is_renewed):
            return sampling.max_tokens
        return max(0, min(sampling.max_tokens, self.max_model_len - num_prompt))

    def _problem(self, new: NewSequence, ids: NDArray[np.int64]) -> str:
        if ids.size == 0:
            return "the prompt is empty"
        if ids.size > self.max_model_len:
            return f"prompt: {ids.size} tokens exceed the {self.max_model_len} of engine.max_model_len"
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            bad = int(ids[(ids < 0) | (ids >= self.vocab_size)][0])
            return f"prompt: token id {bad} is outside the vocabulary of {self.vocab_size} tokens"
        return problem_with(new.sampling, self.vocab_size)

    def _take_slot(self, num_tokens: int, num_blocks: int) -> int:
        self.ensure_columns(num_tokens)
        if num_blocks > self.blocks.shape[1]:
            self.blocks = _widen(self.blocks, num_blocks)
        if not self._free:
            size = self.num_tokens.size
            grown = max(8, 2 * size)
            names = ("tokens", "blocks", "num_tokens", "num_blocks", "num_unread", "adapters", "state_slots")
            for name in names:
                held = getattr(self, name)
                setattr(
                    self, name, np.concatenate((held, np.zeros((grown - size, *held.shape[1:]), np.int64)))
                )
            self.sampling.grow(grown)
            self._free = list(range(size, grown))
        return heappop(self._free)


def _widen(table: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    wide = np.zeros((table.shape[0], max(columns, 2 * table.shape[1])), np.int64)
    wide[:, : table.shape[1]] = table
    return wide
