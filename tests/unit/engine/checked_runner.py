"""A runner that keeps a model of the KV cache and objects to every plan that reads what was never written.

Each slot holds a digest of all tokens up to its position. Before a row is computed, every earlier position of
its sequence must hold the right digest in the block that the table names: so wrong prefix hits, copies after
the fact, early reuse of blocks, lost restores and rows out of order all fail, as wrong numbers would on a
real device. Tokens follow the formula of engine.runner.simulated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from engine.config import SimulatedConfig
from engine.runner.simulated import NamesAlone
from engine.types import (
    ChosenTokens,
    GrammarSpec,
    KeptBlocks,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenLogprobs,
)

CONFIG = SimulatedConfig()


def expected_token(prompt: tuple[int, ...], seed: int, choice_index: int, position: int) -> int:
    """The formula, written out a second time."""
    span = CONFIG.last_token_id - CONFIG.first_token_id
    return CONFIG.first_token_id + (sum(prompt) + 13 * seed + 7 * choice_index + position) % span


def alternatives(tokens: list[int], count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Made-up most likely next tokens of a sequence: ids and log-probabilities, best first."""
    numbers = [(hash((7, *tokens, token)) % 997, token) for token in range(40)]
    best = sorted(numbers, reverse=True)[:count]
    return tuple(token for _, token in best), tuple(number / 997 - 1.001 for number, _ in best)


@dataclass
class State:
    """One sequence on the device."""

    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    choice_index: int
    adapter: str
    table: list[int]
    # Where its state lies; -1 where sequences have none.
    slot: int = -1
    # The blocks that its positions look at, where some are forgotten.
    kept: KeptBlocks | None = None
    # Blocks for what is chosen of its prompt, until that is computed.
    fresh: tuple[int, ...] = ()
    # Where its first row began.
    first_start: int = 1 << 30
    # Its prompt, of which it may have left a part.
    prompt: tuple[int, ...] = ()
    # Drafts of its last step that were not accepted.
    num_rejected: int = 0

    def digest(self, position: int, tokens: list[int]) -> int:
        # What is computed of a part of the past is not what is computed of all of it.
        forgot = self.kept if self.kept is not None and self.kept.num_hidden(position) else None
        return hash((self.adapter, forgot, tuple(tokens[: position + 1])))

    def is_seen(self, position: int, start: int) -> bool:
        """Whether a row from `start` on looks at a position before it."""
        if self.kept is None or not self.kept.num_hidden(start):
            return True
        block = position // self.kept.block_size
        if isinstance(self.kept, ChosenTokens):
            return block >= self.kept.num_whole
        return block < self.kept.num_sinks or block > start // self.kept.block_size - self.kept.num_recent


@dataclass
class CheckedRunner:
    """Steps are computed when they are launched; results are handed out later, in order."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    max_tokens_per_step: int = 1 << 30
    # Only so many positions before a row, its first included, are read; others may be given up.
    window: int | None = None
    # Layers with a window keep blocks of their own, and read so many positions; the others read all.
    num_window_blocks: int = 0
    partial_window: int = 0
    # Called with every plan; a text makes the step fail with it.
    fault: Callable[[SchedulerOutput], str] = lambda plan: ""
    # Drafts to propose after a sequence's tokens, for speculation.
    propose: Callable[[State], tuple[int, ...]] = lambda state: ()
    poison_token_id: int = -1
    # What a step says that it took, in seconds.
    compute_s: float = 0.001
    states: dict[int, State] = field(default_factory=dict)
    num_computed_tokens: int = 0
    num_released: int = 0
    num_forks: int = 0
    # A step failed and the other side has not heard of it.
    unanswered_failure: bool = False

    def __post_init__(self) -> None:
        self.adapters = NamesAlone()
        self.device: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.host: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_host_blocks)]
        self.windows: list[list[int | None]] = [
            [None] * self.block_size for _ in range(self.num_window_blocks)
        ]
        self.window_of: dict[int, int] = {}
        # A slot holds the digest of the tokens that its state has taken in.
        self.slots: dict[int, int] = {}
        self.host_states: dict[int, int] = {}

    def launch(self, plan: SchedulerOutput) -> FinishedStep:
        assert plan.num_tokens <= self.max_tokens_per_step
        for sequence_id in plan.released:
            assert sequence_id in self.states, f"{sequence_id} released but unknown"
            del self.states[sequence_id]
            self.num_released += 1
        for new in plan.new_sequences:
            assert new.sequence_id not in self.states, f"{new.sequence_id} is new twice"
            self.states[new.sequence_id] = self._new_state(new)
        for parent, child in plan.forks:
            assert self.states[parent].tokens[:-1] == self.states[child].tokens[:-1], (
                "not a beam of its parent"
            )
            self.num_forks += 1
        self._copy(plan)
        failure = self.fault(plan)
        if any(self.poison_token_id in self.states[row.sequence_id].tokens for row in plan.scheduled):
            failure = "poisoned"
        if not failure and self.unanswered_failure:
            failure = "planned upon a step that failed"
        if failure:
            self.unanswered_failure = True
            for row in plan.scheduled:
                # Undefined contents after a failure.
                state = self.states[row.sequence_id]
                self._grow(state, row)
                for position in range(row.start, row.start + row.num_tokens):
                    self._slot(state, position, -1)
                self.slots.update(dict.fromkeys((state.slot, *(slot for _, slot in row.snapshots)), -1))
            return FinishedStep(StepResult(plan.step_id, (), failure=failure), self)
        results = tuple(self._compute(row) for row in plan.scheduled)
        return FinishedStep(StepResult(plan.step_id, results, self.compute_s), self)

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        return True

    def num_prefaulted_blocks(self) -> int:
        """No memory is held."""
        return 0

    def expert_spread(self) -> None:
        """No experts lie anywhere."""

    def num_states(self) -> int:
        return len(self.states)

    def block_bytes(self) -> None:
        """A disk of the tests knows the device."""

    def close(self) -> None:
        self.states.clear()

    def _new_state(self, new: NewSequence) -> State:
        return State(
            list(new.token_ids),
            new.num_prompt_tokens,
            new.sampling,
            new.choice_index,
            new.adapter,
            list(new.block_ids),
            new.state_slot,
            new.kept,
            new.fresh_block_ids,
            prompt=new.text[0],
        )

    def _copy(self, plan: SchedulerOutput) -> None:
        for device, host in plan.offloads:
            self.host[host] = list(self.device[device])
        for host, device in plan.restores:
            self.device[device] = list(self.host[host])
        sources = {source for source, _ in plan.block_copies}
        destinations = [destination for _, destination in plan.block_copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        assert not sources & set(destinations), "a copy reads what another one writes"
        for source, destination in plan.block_copies:
            self.device[destination] = list(self.device[source])
        self.window_of.update(plan.window_blocks)
        # All are read before any is written.
        copied = [(into, list(self.windows[source])) for source, into in plan.window_copies]
        assert len({into for into, _ in copied}) == len(copied), "two copies into one window block"
        for into, content in copied:
            self.windows[into] = content
        for retired, contents in (
            (plan.retired_blocks, self.device),
            (plan.retired_window_blocks, self.windows),
        ):
            for each in retired:
                contents[each] = [None] * self.block_size
        into = [destination for _, destination in plan.state_copies]
        assert len(set(into)) == len(into), "two copies into one slot"
        for slot, row in plan.state_offloads:
            self.host_states[row] = self.slots[slot]
        # All are read before any is written.
        self.slots.update({into: self.slots[source] for source, into in plan.state_copies})
        self.slots.update({into: self.host_states[row] for row, into in plan.state_restores})

    def _grow(self, state: State, row: ScheduledSequence) -> None:
        state.table += row.new_block_ids
        if row.num_given_up:
            state.table[: row.num_given_up] = [self.num_blocks] * row.num_given_up

    def _slot(self, state: State, position: int, value: int | None) -> None:
        block = state.table[position // self.block_size]
        self.device[block][position % self.block_size] = value
        if self.num_window_blocks:
            self.windows[self.window_of[block]][position % self.block_size] = value

    def _compute(self, row: ScheduledSequence) -> SequenceResult:
        state = self.states[row.sequence_id]
        self._grow(state, row)
        tokens = state.tokens + list(row.draft_token_ids)
        if row.samples:
            # A plan counts drafts in flight as accepted.
            start = len(tokens) - row.num_tokens
            assert 0 <= row.start - start <= state.num_rejected, "not where its tokens end"
            row = msgspec.structs.replace(row, start=start)
        end = row.start + row.num_tokens
        assert end <= len(tokens), f"row reaches {end}, only {len(tokens)} tokens exist"
        first_read = 0 if self.window is None else max(0, row.start + 1 - self.window)
        self._check_choice(state, row)
        state.first_start = min(state.first_start, row.start)
        if state.kept is not None:
            hidden = [state.kept.num_hidden(position) for position in range(row.start, end)]
            assert len(set(hidden)) == 1, "positions of one row look at different blocks"
        for position in range(first_read, row.start):
            if not state.is_seen(position, row.start):
                continue
            block = state.table[position // self.block_size]
            found = self.device[block][position % self.block_size]
            assert found == state.digest(position, tokens), f"wrong content at position {position}"
            if self.num_window_blocks and position > row.start - self.partial_window:
                kept = self.windows[self.window_of[block]][position % self.block_size]
                assert kept == found, f"wrong content in the window at position {position}"
        for position in range(row.start, end):
            self._slot(state, position, state.digest(position, tokens))
        self._choose(state, end)
        self.num_computed_tokens += row.num_tokens
        self._move_state(state, row, tokens, end)
        assert row.samples == (end == len(tokens)), "a row samples exactly when it reaches the last token"
        if not row.samples:
            return SequenceResult(row.sequence_id, ())
        return self._sample(row, state)

    def _check_choice(self, state: State, row: ScheduledSequence) -> None:
        """What follows the prompt finds what was chosen of it."""
        kept = state.kept
        if isinstance(kept, ChosenTokens) and row.start >= kept.start:
            for index, block in enumerate(state.table[: kept.num_fresh]):
                assert self.device[block][0] == _choice(state, kept, index), "not what was chosen"

    def _choose(self, state: State, end: int) -> None:
        """Where the prompt ends, tokens of it go into fresh blocks, if all voters were computed here."""
        kept = state.kept
        if not isinstance(kept, ChosenTokens) or end != kept.start:
            return
        assert len(state.fresh) == kept.num_fresh, "no room for what is chosen"
        assert state.first_start <= kept.first_voter, "not all voters are computed"
        spare = [self.num_blocks] * (kept.num_whole - kept.num_fresh)
        state.table[: kept.num_whole] = [*state.fresh, *spare]
        for index, block in enumerate(state.fresh):
            self.device[block] = [_choice(state, kept, index)] * self.block_size

    def _move_state(self, state: State, row: ScheduledSequence, tokens: list[int], end: int) -> None:
        if state.slot < 0:
            assert not row.snapshots, "copies of a state that is not there"
            return
        if row.start:
            expected = state.digest(row.start - 1, tokens)
            assert self.slots[state.slot] == expected, f"not the state of position {row.start}"
        for num_tokens, slot in row.snapshots:
            assert row.start < num_tokens <= end, "a copy is of no token of the row"
            is_behind_draft = num_tokens >= end - len(row.draft_token_ids)
            assert is_behind_draft or num_tokens % self.block_size == 0, "a copy is not at a block's end"
            self.slots[slot] = state.digest(num_tokens - 1, tokens)
        self.slots[state.slot] = state.digest(end - 1, tokens)

    def _sample(self, row: ScheduledSequence, state: State) -> SequenceResult:
        first = len(state.tokens) - state.num_prompt_tokens

        def token(position: int) -> int:
            return expected_token(state.prompt, state.sampling.seed, state.choice_index, position)

        sampled = [token(first)]
        for draft in row.draft_token_ids:
            if draft != sampled[-1]:
                break
            sampled.append(token(first + len(sampled)))
        first_known = len(state.tokens)
        state.tokens += sampled
        state.num_rejected = len(row.draft_token_ids) + 1 - len(sampled)
        logprobs = ()
        if state.sampling.logprobs is not None:
            top = alternatives(state.tokens[:first_known], state.sampling.logprobs)
            logprobs = tuple(
                TokenLogprobs(each, -(each % 7) / 10 - 0.01, *(top if index == 0 else ((), ())))
                for index, each in enumerate(sampled)
            )
        return SequenceResult(
            row.sequence_id,
            tuple(sampled),
            logprobs,
            next_draft_token_ids=self.propose(state),
            num_drafted=len(row.draft_token_ids),
            num_accepted=len(sampled) - 1,
        )


def _choice(state: State, kept: ChosenTokens, index: int) -> int:
    """What stands in the block of that number which holds chosen tokens."""
    return hash((index, state.digest(kept.start, state.tokens[: kept.start])))


@dataclass
class FinishedStep:
    """A pending step that is done already."""

    result: StepResult
    runner: CheckedRunner

    def wait(self) -> StepResult:
        if self.result.failure:
            self.runner.unanswered_failure = False
        return self.result
