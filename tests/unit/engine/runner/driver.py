"""Drives a real runner with a few lines of scheduler: chunks, shuffled blocks, prefix hits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engine.config import CacheConfig, EngineConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import (
    GrammarSpec,
    NewSequence,
    SamplingParams,
    ScheduledSequence,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenLogprobs,
)
from runtime.config import ModelConfig

# How a runner is made: loaded by this process or by another.
Build = Callable[..., Any]
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)


def open_runner(
    folder: Path, *, poison: bool = True, build: Build = build_here, **options: Any
) -> ModelRunner:
    """A runner with a small cache, filled with NaN so that a slot which nobody wrote shows."""
    cache = CacheConfig(
        kv_cache_bytes=int(options.pop("kv_cache_bytes", 32 << 20)), **options.pop("cache", {})
    )
    config = EngineConfig(**({"dtype": "float32", "num_threads": 1, "cache": cache} | options))
    runner, _, _ = build(config, ModelConfig(path=str(folder)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    if poison:
        for layer in runner.storage.layers:
            for tensor in layer.tensors():
                poison_floats(tensor)
    return runner


def generated(folder: Path, jobs: Iterable[Job], *, seed: int = 0, **options: Any) -> list[Job]:
    """What a runner of their own makes of jobs."""
    with closing(open_runner(folder, **options)) as runner:
        return Driver(runner, seed=seed).run(jobs)


def poison_floats(values: NDArray[Any] | torch.Tensor) -> None:
    """NaN into a tensor, or an array, where it holds numbers in floating point."""
    if isinstance(values, torch.Tensor):
        if values.dtype.is_floating_point:
            values.fill_(float("nan"))
    elif values.dtype == np.uint16:
        # Bits of bfloat16.
        values.fill(0x7FC0)
    elif np.issubdtype(values.dtype, np.floating):
        values.fill(np.nan)


@dataclass
class Job:
    """One sequence and what came of it."""

    prompt: list[int]
    num_tokens: int = 8
    sampling: SamplingParams = GREEDY
    choice: int = 0
    grammar: GrammarSpec | None = None
    # Tokens of the prompt that a step computes at most.
    chunk: int = 1 << 30
    # Drafts by output position; the runner's own proposals go here as well when the driver speculates.
    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    speculate: bool = False
    adapter_slot: int = -1
    tenant: str = ""
    cache_salt: bytes = b""
    # Numbers of tokens after which a copy of its state is left, each with the copy's slot.
    copies: dict[int, int] = field(default_factory=dict)
    # Filled by the driver.
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: str = ""
    grammar_finished: bool = False
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


def new_sequence(sequence_id: int, job: Job, blocks: Iterable[int], state_slot: int = -1) -> NewSequence:
    """A job's sequence as a plan brings it."""
    return NewSequence(
        sequence_id=sequence_id,
        token_ids=(*job.prompt, *job.output),
        num_prompt_tokens=len(job.prompt),
        sampling=job.sampling,
        choice_index=job.choice,
        grammar=job.grammar,
        adapter="",
        block_ids=tuple(blocks),
        adapter_slot=job.adapter_slot,
        state_slot=state_slot,
        tenant=job.tenant,
        cache_salt=job.cache_salt,
    )


class Driver:
    """Runs jobs to their end, all of them in every step."""

    def __init__(self, runner: ModelRunner, *, seed: int = 0) -> None:
        self.runner = runner
        self._ids = iter(range(1, 1 << 30))
        self._steps = iter(range(1 << 30))
        self._free = np.random.default_rng(seed).permutation(runner.storage.num_blocks).tolist()
        # Slots of states, where the model has some.
        # Window blocks, where only some layers have a window; by block, those that are in use.
        self._window = runner.model.spec.sliding_reach
        num_window_blocks = runner.storage.num_window_blocks
        self._free_windows = np.random.default_rng(seed).permutation(num_window_blocks).tolist()
        self._window_of: dict[int, int] = {}
        self._free_states = np.random.default_rng(seed).permutation(runner.storage.num_states).tolist()

    def run(
        self, jobs: Iterable[Job], *, prefix: tuple[list[int], int] | None = None, state: int = -1
    ) -> list[Job]:
        """Generates; `prefix` is (blocks, computed tokens) that every job's prompt begins with, and `state`
        the slot of the state behind it.
        """
        live: dict[int, tuple[Job, list[int], int]] = {}
        tables: dict[int, list[int]] = {}
        ended: list[int] = []
        jobs = list(jobs)
        new = []
        slots: dict[int, int] = {}
        for job in jobs:
            sequence_id = next(self._ids)
            shared, computed = prefix or ([], 0)
            own = self.take_blocks(len(job.prompt) + job.num_tokens + 40, len(shared))
            live[sequence_id] = (job, own, computed)
            slots[sequence_id] = self.take_state()
            tables[sequence_id] = [*shared, *own]
            new.append(new_sequence(sequence_id, job, tables[sequence_id], slots[sequence_id]))
        copies = tuple((state, slot) for slot in slots.values() if state >= 0)
        while live or ended:
            scheduled = [self._next(sequence_id, *entry) for sequence_id, entry in live.items()]
            plan = SchedulerOutput(
                next(self._steps),
                tuple(new),
                tuple(scheduled),
                tuple(ended),
                state_copies=copies,
                window_blocks=tuple(
                    each for row in scheduled for each in self._slide(row, tables[row.sequence_id])
                ),
            )
            result = self.step(plan)
            new, ended, copies = [], [], ()
            found = {outcome.sequence_id: outcome for outcome in result.results}
            for sequence in scheduled:
                job, own, _ = live[sequence.sequence_id]
                outcome = found.get(sequence.sequence_id)
                advanced = sequence.start + sequence.num_tokens - len(sequence.draft_token_ids)
                if outcome is not None:
                    _take(job, outcome)
                    advanced += max(len(outcome.token_ids) - 1, 0)
                live[sequence.sequence_id] = (job, own, advanced)
                if job.failure or job.grammar_finished or len(job.output) >= job.num_tokens:
                    del live[sequence.sequence_id]
                    ended.append(sequence.sequence_id)
                    self._free.extend(own)
                    self._leave(own)
                    if slots[sequence.sequence_id] >= 0:
                        self._free_states.append(slots[sequence.sequence_id])
        assert self.runner.num_states() == 0
        return jobs

    def step(self, plan: SchedulerOutput) -> StepResult:
        """One plan, at once."""
        result = self.runner.launch(plan).wait()
        assert not result.failure
        return result

    def take_blocks(self, num_tokens: int, num_shared: int = 0) -> list[int]:
        """Blocks for so many tokens, in random order."""
        needed = -(-num_tokens // self.runner.storage.block_size) - num_shared
        return [self._free.pop() for _ in range(needed)]

    def _slide(self, row: ScheduledSequence, table: list[int]) -> list[tuple[int, int]]:
        """Window blocks that a row takes, after those behind its window were given up."""
        if not self.runner.storage.num_window_blocks:
            return []
        size, end = self.runner.storage.block_size, row.start + row.num_tokens
        self._leave(table[: max(0, row.start + 1 - self._window) // size])
        written = table[row.start // size : -(-end // size)]
        taken = [(each, self._free_windows.pop()) for each in written if each not in self._window_of]
        self._window_of.update(taken)
        return taken

    def _leave(self, blocks: list[int]) -> None:
        kept = [self._window_of.pop(each) for each in blocks if each in self._window_of]
        self._free_windows.extend(kept)

    def take_state(self) -> int:
        """A slot for a state; -1 where the model has none."""
        return self._free_states.pop() if self._free_states else -1

    def _next(self, sequence_id: int, job: Job, own: list[int], computed: int) -> ScheduledSequence:
        known = len(job.prompt) + len(job.output)
        count = min(known - computed, job.chunk)
        samples = computed + count == known
        drafts = job.drafts.get(len(job.output), ()) if samples else ()
        job.num_steps += 1
        snapshots = tuple(each for each in job.copies.items() if computed < each[0] <= computed + count)
        return ScheduledSequence(
            sequence_id, computed, count + len(drafts), (), samples, drafts, snapshots=snapshots
        )


def _take(job: Job, outcome: SequenceResult) -> None:
    job.output.extend(outcome.token_ids)
    job.logprobs.extend(outcome.logprobs)
    job.prompt_logprobs.extend(outcome.prompt_logprobs)
    job.failure = outcome.failure
    job.grammar_finished = outcome.grammar_finished
    job.num_drafted += outcome.num_drafted
    job.num_accepted += outcome.num_accepted
    if job.speculate:
        job.drafts[len(job.output)] = outcome.next_draft_token_ids


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
