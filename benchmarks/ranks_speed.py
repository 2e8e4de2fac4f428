"""Ranks of one thread each beside one process of as many threads, over the same checkpoint in the same run.

Each side is a runner as an engine's core has it, without any other process; sides take turns. Rows are
sequences that decode, each behind a context of 64 tokens; a prompt is computed in one step. A figure is the
median of all rounds' steps. "of one" is the rate of the ranks as a share of the one process's; "sums %" is
what part of the leader's step its ops of communication took, waits for the other ranks included (op by op, in
further steps, which that slows down). Both sides have the same cores, so that ranks can gain nothing here:
they are for machines where a part of the memory is nearer.

    python -m benchmarks.ranks_speed [--checkpoint llama-40m] [--ranks 2] [--rows 1 8 32] [--prompts 512]
        [--rounds 5] [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

from benchmarks.engine.report import Row, options, publish
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native.library import Program
from runtime.config import ModelConfig

Watch = AbstractContextManager[object]
_CONTEXT = 64
_NUM_STEPS = 30
# In a round.
_NUM_PROMPTS = 3
_BLOCK_SIZE = 16
# What a rank says to the others and hears of them; the first op of a step waits until these are free.
_COMMUNICATION = ("rank_step", "rank_sum", "rank_logits")


class Side:
    """One way to compute the model."""

    def __init__(self, checkpoint: Path, num_threads: int, num_ranks: int, dtype: str) -> None:
        config = EngineConfig(
            native="required",
            dtype=dtype,
            num_threads=num_threads,
            max_model_len=2048,
            parallel=ParallelConfig(tensor=num_ranks),
            cache=CacheConfig(kv_cache_bytes=512 << 20, block_size=_BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=1024),
        )
        model = ModelConfig(path=str(checkpoint))
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


def compare(alone: Side, shared: Side, num_rows: int, length: int, rounds: int) -> Row:
    """The figures of one kind of step."""
    found: dict[int, list[float]] = {0: [], 1: []}
    for turn in range(-1, rounds):
        # Whoever comes first in a round does not in the next.
        for index in (0, 1) if turn % 2 else (1, 0):
            spent = (alone, shared)[index].measure(num_rows, length)
            # The first one makes programs.
            found[index] += spent if turn >= 0 else []
    ours, theirs = median(found[1]), median(found[0])
    return {
        "step": f"{num_rows} rows" if num_rows else f"prompt of {length}",
        "one process ms": 1e3 * theirs,
        "ranks ms": 1e3 * ours,
        "of one": theirs / ours,
        "sums %": 100 * shared.communication(num_rows, length),
    }


def main() -> None:
    """Prints the table, and writes it with --json."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=SHAPES, default="llama-40m")
    parser.add_argument("--ranks", type=int, default=2, help="and threads of the one process")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[512])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    chosen = parser.parse_args()
    checkpoint = make_checkpoint(chosen.checkpoint, chosen.environments)
    kinds = [(rows, 0) for rows in chosen.rows] + [(0, length) for length in chosen.prompts]
    with ExitStack() as stack:
        alone, shared = (
            stack.enter_context(closing(Side(checkpoint, chosen.ranks, num_ranks, chosen.dtype)))
            for num_ranks in (1, chosen.ranks)
        )
        rows = [compare(alone, shared, *kind, chosen.rounds) for kind in kinds]
    title = (
        f"{chosen.checkpoint}, {chosen.dtype}: {chosen.ranks} ranks of a thread each beside one process of "
        f"{chosen.ranks} threads"
    )
    publish(title, rows, chosen.json)


if __name__ == "__main__":
    main()
