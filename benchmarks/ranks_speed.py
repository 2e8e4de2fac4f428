"""Ranks of one thread each beside one process of as many threads, over the same checkpoint in the same run.

Each side is a runner as an engine's core has it, without any other process; sides take turns. Rows are
sequences that decode, each behind a context of 64 tokens; a prompt is computed in one step. A figure is the
median of all rounds' steps. "of one" is the rate of the ranks as a share of the one process's; "sums %" is
what part of the leader's step its ops of communication took, waits for the other ranks included (op by op, in
further steps, which that slows down). With --stages the ranks are stages of a pipeline, cut into as many
micro-batches as there are stages, and into more: "busy %" is what part of a step the first stage computes,
and does not wait for the last one. Both sides have the same cores, so that ranks can gain nothing here:
they are for machines where a part of the memory is nearer.

    python -m benchmarks.ranks_speed [--checkpoint llama-40m] [--ranks 2] [--stages] [--rows 1 8 32]
        [--prompts 512] [--rounds 5] [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from benchmarks.engine.report import Row, options, publish
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.runner.build import build_here
from engine.runner.ranks import group
from engine.runner.ranks.group import ranks_shape
from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native.library import Program
from kernels.ranks.native import RanksShape
from runtime.config import ModelConfig

Watch = AbstractContextManager[object]
_CONTEXT = 64
_NUM_STEPS = 30
# In a round.
_NUM_PROMPTS = 3
_BLOCK_SIZE = 16
# What a rank says to the others and hears of them; the first op of a step waits until these are free.
_COMMUNICATION = ("rank_step", "rank_sum", "rank_logits", "rank_receive")
# Micro-batches for each stage at most: as many as stages, and what a step has by default.
_BY_STAGE = (1, 4)


class Side:
    """One way to compute the model."""

    def __init__(
        self, checkpoint: Path, num_threads: int, parallel: ParallelConfig, dtype: Any, by_stage: int = 4
    ) -> None:
        """`by_stage`: micro-batches for each stage at most."""
        config = EngineConfig(
            native="required",
            dtype=dtype,
            num_threads=num_threads,
            max_model_len=2048,
            parallel=parallel,
            cache=CacheConfig(kv_cache_bytes=512 << 20, block_size=_BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=1024),
        )
        model = ModelConfig(path=str(checkpoint))

        def shape(*given: Any) -> RanksShape:
            return replace(ranks_shape(*given), most_by_stage=by_stage)

        with patch.object(group, "ranks_shape", shape):
            runner, _, _ = build_here(config, model, lambda stage, part: None)
        assert isinstance(runner, ModelRunner)
        self.runner = runner
        self._step_ids, self._sequence_ids = itertools.count(), itertools.count(1)
        self._draw = random.Random(0)

    def close(self) -> None:
        """Ends the ranks."""
        self.runner.close()

    def step(self, plan: SchedulerOutput) -> float:
        """Seconds of a step."""
        began = time.perf_counter()
        self.runner.launch(plan).wait()
        return time.perf_counter() - began

    def _begin(self, lengths: Sequence[int]) -> tuple[list[NewSequence], list[ScheduledSequence]]:
        """Sequences of so many drawn tokens, whose prompts are computed in one step."""
        new, rows, first = [], [], 0
        for length in lengths:
            number, count = next(self._sequence_ids), -(-(length + _NUM_STEPS + 1) // _BLOCK_SIZE)
            tokens = tuple(self._draw.randrange(1, self.runner.model.spec.vocab_size) for _ in range(length))
            sampling = SamplingParams(temperature=0.0, max_tokens=_NUM_STEPS + 1)
            new.append(
                NewSequence(
                    sequence_id=number,
                    token_ids=tokens,
                    num_prompt_tokens=length,
                    sampling=sampling,
                    choice_index=0,
                    grammar=None,
                    adapter="",
                    block_ids=tuple(range(first, first + count)),
                )
            )
            rows.append(ScheduledSequence(number, 0, length, (), True))
            first += count
        return new, rows

    def _end(self, new: Sequence[NewSequence]) -> None:
        self.step(SchedulerOutput(next(self._step_ids), released=tuple(each.sequence_id for each in new)))

    def prompt(self, length: int, watch: Watch) -> list[float]:
        """Seconds of a prompt."""
        new, rows = self._begin([length])
        with watch:
            spent = self.step(SchedulerOutput(next(self._step_ids), tuple(new), tuple(rows)))
        self._end(new)
        return [spent]

    def decode(self, num_rows: int, watch: Watch) -> list[float]:
        """Seconds of the steps in which so many sequences decode."""
        new, rows = self._begin([_CONTEXT] * num_rows)
        for each, row in zip(new, rows, strict=True):
            self.step(SchedulerOutput(next(self._step_ids), (each,), (row,)))
        spent = []
        with watch:
            for done in range(_NUM_STEPS):
                following = tuple(
                    ScheduledSequence(each.sequence_id, _CONTEXT + done, 1, (), True) for each in new
                )
                spent.append(self.step(SchedulerOutput(next(self._step_ids), (), following)))
        self._end(new)
        return spent

    def measure(self, num_rows: int, length: int, watch: Watch | None = None) -> list[float]:
        """Seconds of steps of rows, or of a prompt, which `watch` is around."""
        around = watch or nullcontext()
        if num_rows:
            return self.decode(num_rows, around)
        return [spent for _ in range(_NUM_PROMPTS) for spent in self.prompt(length, around)]

    def communication(self, num_rows: int, length: int) -> float:
        """Its share of the time of all ops."""
        by_op: dict[bool, float] = {False: 0.0, True: 0.0}

        def timed(program: Program, pool: int) -> None:
            spent = program.run_timed(pool)
            for op, seconds in zip(program.ops, spent, strict=True):
                by_op[op.name in _COMMUNICATION] += seconds

        self.measure(num_rows, length, patch.object(Program, "run", timed))
        return by_op[True] / (by_op[True] + by_op[False])


def medians(sides: Sequence[Side], num_rows: int, length: int, rounds: int) -> list[float]:
    """Seconds of one kind of step on each side."""
    found: list[list[float]] = [[] for _ in sides]
    for turn in range(-1, rounds):
        # Whoever comes first in a round does not in the next.
        order = list(enumerate(sides))
        for index, side in order if turn % 2 else reversed(order):
            spent = side.measure(num_rows, length)
            # The first one makes programs.
            found[index] += spent if turn >= 0 else []
    return [median(spent) for spent in found]


def compare(sides: Sequence[Side], num_rows: int, length: int, rounds: int) -> Row:
    """The figures of one kind of step, by one process and by ranks."""
    theirs, ours = medians(sides, num_rows, length, rounds)
    return {
        "step": step_name(num_rows, length),
        "one process ms": 1e3 * theirs,
        "ranks ms": 1e3 * ours,
        "of one": theirs / ours,
        "sums %": 100 * sides[1].communication(num_rows, length),
    }


def compare_stages(sides: Sequence[Side], num_rows: int, length: int, rounds: int) -> Row:
    """The same by one process, and by a pipeline with few micro-batches and with more."""
    theirs, *ours = medians(sides, num_rows, length, rounds)
    busy = [100 * (1 - side.communication(num_rows, length)) for side in sides[1:]]
    return {
        "step": step_name(num_rows, length),
        "one process ms": 1e3 * theirs,
        "few ms": 1e3 * ours[0],
        "more ms": 1e3 * ours[1],
        "few tok/s": (num_rows or length) / ours[0],
        "more tok/s": (num_rows or length) / ours[1],
        "few busy %": busy[0],
        "more busy %": busy[1],
    }


def step_name(num_rows: int, length: int) -> str:
    """What is computed in it."""
    return f"{num_rows} rows" if num_rows else f"prompt of {length}"


def main() -> None:
    """Prints the table, and writes it with --json."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=SHAPES, default="llama-40m")
    parser.add_argument("--ranks", type=int, default=2, help="and threads of the one process")
    parser.add_argument("--stages", action="store_true", help="ranks are stages of a pipeline")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    chosen = parser.parse_args()
    checkpoint = make_checkpoint(chosen.checkpoint, chosen.environments)
    kinds = [(rows, 0) for rows in chosen.rows] + [(0, length) for length in chosen.prompts]
    count, dtype = chosen.ranks, chosen.dtype
    ways = [(ParallelConfig(), 1), (ParallelConfig(tensor=count), 1)]
    if chosen.stages:
        ways[1:] = [(ParallelConfig(pipeline=count), by_stage) for by_stage in _BY_STAGE]
    with ExitStack() as stack:
        sides = [
            stack.enter_context(closing(Side(checkpoint, count, parallel, dtype, by_stage)))
            for parallel, by_stage in ways
        ]
        measured: Callable[[Sequence[Side], int, int, int], Row] = compare
        if chosen.stages:
            measured = compare_stages
        rows = [measured(sides, num_rows, length, chosen.rounds) for num_rows, length in kinds]
    what = "stages" if chosen.stages else "ranks"
    title = (
        f"{chosen.checkpoint}, {dtype}: {count} {what} of a thread each beside one process of {count} threads"
    )
    publish(title, rows, chosen.json)


if __name__ == "__main__":
    main()
