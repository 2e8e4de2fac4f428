"""Steps and prompts on a CPU, beside what the machine's memory and units allow at the same level.

For each number of rows a step in which so many sequences decode, and prompts of 512 and 2,048 tokens, each by
the real loop, scheduler and runner over random weights, without any other process. "read" is the time of the
weights and of the cached keys and values at the rate at which memory was read, "multiply" that of all
operations, attention's included, at the rate of the fastest product; the share is that of the longer in the
median step (of the shortest prompt). Rates are the better of two measurements, just before and just after, as
what a virtual machine's memory gives changes from minute to minute; torch is held to the level, too. "native
%" is the part of a step inside the kernels. Weights that fit a cache are read faster than memory is: the
0.6 B checkpoint's do not. The second table is what a prompt adds to the steps of answers beside which it is
computed, and the same prompt alone: 100 % and more where both together are no dearer than their parts
(medians of turns back and forth). The third says where a step goes: to the parts of the core's loop, and to
ops (products by outputs x inputs), and at what rate these read and multiply.

NATIVE_KERNELS_LEVEL forces a level of instructions below the machine's best. "others" says how many CPUs
other programs took meanwhile: above 0.05, measure again. Lines tell what was found as it goes. Needs what
`make dev` installs: transformers makes the checkpoint.

    python -m benchmarks.engine.cpu_step [--checkpoint qwen3-0.6b] [--ours bf16] [--rows 1 4 8 16 32 64]
        [--prompts 512 2048] [--context 64] [--mixed 8+64 8+256 32+256] [--parts 1 32] [--environments DIR]
        [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int64
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import msgspec
import psutil

from benchmarks.engine.report import Row, options, publish
from benchmarks.in_process import InProcessEngine, Mailbox
from benchmarks.peers.checkpoints import (
    SHAPES,
    attention_operations,
    kv_values_per_token,
    make_checkpoint,
    matrix_parameters,
)
from benchmarks.peers.levels import hold_this_process
from benchmarks.peers.roofline import Machine, Precision, measure_machine
from benchmarks.peers.tables import OURS, precision_of
from engine.config import EngineConfig
from engine.core import messages
from engine.core.__main__ import make_scheduler
from engine.core.loop import EngineLoop
from engine.core.messages import encode
from engine.model.native_decoder import NativeDecoder
from engine.runner.base import PendingStep
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import ScheduledSequence, SchedulerOutput, TokenEvent
from kernels.native.library import Op, Program
from runtime.config import ModelConfig

_NUM_TOKENS = 24
# A decode step's runs end, and no further prompt begins, once they have taken so long.
_RUNS_S = 4.0
# Prompts in one run of answers, and runs with and without them.
_NUM_CHUNKS = 4
_MIXED_TURNS = 3
# Rows of the products that show the machine's rate: torch's may run at a hundredth of it.
_RATE_ROWS = 512
_KV_BYTES = 2 << 30
# Parts that take less of a step are left out.
_LEAST_MS = 0.01


class _Encoding(Mailbox):
    """Encodes what is published, as the socket to the front would have it."""

    def send(self, message: messages.Report) -> None:
        encode(message)
        super().send(message)


class _Watch:
    """Seconds by part, of every step."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = defaultdict(list)
        # Of all steps, those that are not counted included.
        self.total_s: dict[str, float] = defaultdict(float)
        self._now: dict[str, float] = defaultdict(float)

    def around(self, owner: Any, name: str, part: str) -> None:
        """Counts the calls of a method."""
        inner = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            with self.during(part):
                return inner(*args, **options)

        setattr(owner, name, timed)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Counts what happens inside."""
        began = time.perf_counter()
        yield
        seconds = time.perf_counter() - began
        self._now[part] += seconds
        self.total_s[part] += seconds

    def end_step(self, *, counts: bool) -> None:
        """Closes one step's account."""
        for part, seconds in self._now.items() if counts else ():
            self.parts[part].append(seconds)
        self._now.clear()

    def median_ms(self, part: str) -> float:
        """Over the steps that count."""
        return 1e3 * median(self.parts[part])


class OpTimes:
    """What each op of a forward took, by `_name_of`: milliseconds and multiplied weights."""

    def __init__(self) -> None:
        self.forwards: list[tuple[int, dict[str, float]]] = []
        self.weights: dict[str, int] = {}

    def run(self, program: Program, pool: int) -> None:
        """In place of `Program.run`. What has a body opens a forward; a head or sampling alone belongs to the
        one before.
        """
        spent, ops = program.run_timed(pool), program.ops
        times: dict[str, float] = {}
        weights: dict[str, int] = {}
        for op, seconds in zip(ops, spent, strict=True):
            name = _name_of(op)
            times[name] = times.get(name, 0.0) + 1e3 * seconds
            if op.name == "gemm":
                weights[name] = weights.get(name, 0) + op.args.weight.outputs * op.args.weight.inputs
        self.weights |= weights
        embedding = next((op for op in ops if op.name == "embedding"), None)
        if embedding is not None:
            self.forwards.append((c_int64.from_address(embedding.args.step).value, {}))
        if self.forwards:
            self.forwards[-1][1].update(times)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the programs that run inside."""

        def timed(program: Program, pool: int) -> None:
            self.run(program, pool)

        with patch.object(Program, "run", timed):
            yield

    def medians_ms(self, num_tokens: int) -> dict[str, float]:
        """By op, over forwards of so many tokens."""
        found = [times for count, times in self.forwards if count == num_tokens]
        return {name: median(times.get(name, 0.0) for times in found) for name in found[-1]}


def _name_of(op: Op) -> str:
    return f"{op.args.weight.outputs} x {op.args.weight.inputs}" if op.name == "gemm" else op.name


class Bench:
    """One loaded checkpoint, driven in this process."""

    def __init__(self, checkpoint: Path, precision: str) -> None:
        self.precision = precision_of(f"millrace-{precision}")
        settings: dict[str, Any] = {"max_model_len": 4096}
        for name, value in {**OURS[precision][0], "cache.kv_cache_bytes": _KV_BYTES}.items():
            section, _, key = name.rpartition(".")
            (settings.setdefault(section, {}) if section else settings)[key] = value
        self.config = msgspec.convert(settings, EngineConfig)
        self.model = ModelConfig(path=str(checkpoint))
        runner, self.memory, self.facts = build_here(self.config, self.model, lambda stage, part: None)
        assert isinstance(runner, ModelRunner)
        assert isinstance(runner.model, NativeDecoder), "there are no native kernels here"
        self.runner, self.level = runner, runner.model.library.level
        self.watch = _Watch()
        self.watch.around(runner.model.library, "run_pool", "native")
        self._plan: SchedulerOutput | None = None
        launch = runner.launch

        def noted(plan: SchedulerOutput) -> PendingStep:
            self._plan = plan
            return launch(plan)

        runner.launch = noted  # type: ignore[method-assign]
        self.watch.around(runner, "launch", "launch")
        self._num_ended = 0
        self._num_cached = 0

    def engine(self, config: EngineConfig) -> InProcessEngine:
        """A loop of its own over the runner; nothing is cached at first."""
        scheduler = make_scheduler(config, self.model, self.memory, self.facts)
        mailbox = _Encoding(listener=self._note)
        self.watch.around(scheduler, "schedule", "plan")
        self.watch.around(scheduler, "update", "results")
        self.watch.around(mailbox, "send", "publish")
        self._num_ended = 0
        loop = EngineLoop(scheduler, self.runner, mailbox)
        return InProcessEngine(loop, mailbox, self.memory, self.facts)

    def _note(self, event: TokenEvent) -> None:
        self._num_ended += event.finish_reason is not None
        if event.first_token is not None:
            self._num_cached = event.first_token.cached_prompt_tokens

    def run(self, num_sequences: int, prompt: int, num_tokens: int) -> tuple[float, float]:
        """Seconds of greedy answers to so many random prompts at once, and CPUs that others took. The watch
        keeps the steps in which all of them decode.
        """
        engine = self.engine(self.config)
        for _ in range(num_sequences):
            engine.submit(prompt, num_tokens)
        began, busy, own = time.perf_counter(), _busy_s(), time.process_time()
        while self._num_ended < num_sequences:
            self._plan = None
            with self.watch.during("step"):
                engine.loop.step()
            decoding = self._decoding(num_sequences)
            self.watch.end_step(counts=bool(decoding))
            if decoding:
                self.watch.parts["context"].append(1 + sum(each.start for each in decoding) / num_sequences)
        seconds = time.perf_counter() - began
        # The runner forgets the last sequences.
        engine.loop.step()
        others = (_busy_s() - busy - (time.process_time() - own)) / seconds
        return seconds, max(0.0, others)

    def first_token_s(self, engine: InProcessEngine, prompt: tuple[int, ...]) -> tuple[float, int]:
        """Seconds from a prompt to its first token, of an engine that has nothing else to do, and how many of
        its tokens were not computed.
        """
        began, num_before = time.perf_counter(), self._num_ended
        engine.submit(0, 1, prompt=prompt)
        while self._num_ended == num_before:
            engine.loop.step()
        seconds = time.perf_counter() - began
        engine.loop.step()
        self.watch.end_step(counts=False)
        return seconds, self._num_cached

    def beside(self, num_sequences: int, prompt: int, num_tokens: int, chunk: int, num_chunks: int) -> float:
        """Seconds that so many sequences take from the first step in which all of them decode to their end,
        while in each of the first `num_chunks` of these steps a prompt of `chunk` tokens is computed whole.
        """
        whole = msgspec.structs.replace(self.config.scheduler, step_target_ms=0.0)
        engine = self.engine(msgspec.structs.replace(self.config, scheduler=whole))
        for _ in range(num_sequences):
            engine.submit(prompt, num_tokens)
        began, num_asked = 0.0, 0
        while self._num_ended < num_sequences + num_chunks:
            if began and num_asked < num_chunks:
                engine.submit(chunk, 1)
                num_asked += 1
            self._plan = None
            engine.loop.step()
            if self._decoding(num_sequences):
                began = began or time.perf_counter()
        seconds = time.perf_counter() - began
        engine.loop.step()
        self.watch.end_step(counts=False)
        return seconds

    def _decoding(self, num_sequences: int) -> tuple[ScheduledSequence, ...]:
        """What the last step computed, if so many sequences decoded in it and nothing else was computed."""
        scheduled = self._plan.scheduled if self._plan else ()
        alone = len(scheduled) == num_sequences and all(each.num_tokens == 1 for each in scheduled)
        return scheduled if alone else ()


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def step_row(bench: Bench, rows: int, context: int) -> Row:
    """Milliseconds of a step in which so many sequences decode, in the median of one run or more."""
    bench.watch.parts = defaultdict(list)
    began, others = time.perf_counter(), 0.0
    while not bench.watch.parts["step"] or time.perf_counter() - began < _RUNS_S / 2:
        others = max(others, bench.run(rows, context, _NUM_TOKENS)[1])
    return {
        "work": f"step of {rows}",
        "rows": rows,
        "context": round(median(bench.watch.parts["context"])),
        "ms": bench.watch.median_ms("step"),
        "native %": 100 * bench.watch.median_ms("native") / bench.watch.median_ms("step"),
        "others": round(others, 2),
    }


def prompt_row(bench: Bench, num_tokens: int) -> Row:
    """Milliseconds from a prompt to its token, the shortest of two runs or more."""
    runs: list[tuple[float, float, float]] = []
    began = time.perf_counter()
    while len(runs) < 2 or time.perf_counter() - began < _RUNS_S:
        before = bench.watch.total_s["native"]
        seconds, others = bench.run(1, num_tokens, 1)
        runs.append((seconds, bench.watch.total_s["native"] - before, others))
    seconds, native_s, _ = min(runs)
    return {
        "work": f"prompt of {num_tokens}",
        "rows": num_tokens,
        "context": 0,
        "ms": 1e3 * seconds,
        "native %": 100 * native_s / seconds,
        "others": round(max(others for *_, others in runs), 2),
    }


def _mixed(bench: Bench, rows: int, context: int, chunk: int) -> Row:
    """Milliseconds that a prompt adds to steps in which so many sequences decode, and those of it alone."""
    together, alone = [], []
    for _ in range(_MIXED_TURNS):
        answers_s, both_s = (
            bench.beside(rows, context, _NUM_TOKENS, chunk, count) for count in (0, _NUM_CHUNKS)
        )
        together.append((both_s - answers_s) / _NUM_CHUNKS)
        alone.append(median(bench.run(1, chunk, 1)[0] for _ in range(3)))
    added_ms, alone_ms = 1e3 * median(together), 1e3 * median(alone)
    return {
        "work": f"prompt of {chunk} beside {rows}",
        "context": context,
        "added ms": added_ms,
        "baseline: alone ms": alone_ms,
        "share %": 100 * alone_ms / added_ms,
    }


def part_rows(bench: Bench, rows: int, context: int) -> list[Row]:
    """Milliseconds of each part of the loop and of each op, of a step in which so many sequences decode."""
    step_row(bench, rows, context)
    took = {part: bench.watch.median_ms(part) for part in ("plan", "launch", "results", "publish")}
    took["launch"] -= bench.watch.median_ms("native")
    times = OpTimes()
    with times.counted():
        bench.run(rows, context, _NUM_TOKENS)
    took |= times.medians_ms(rows)
    total = sum(took.values())
    return [
        {
            "sequences": rows,
            "part": part,
            "ms": round(ms, 3),
            "share %": round(100 * ms / total, 1),
            "GB/s": round(times.weights.get(part, 0) * bench.precision.weight_bytes / ms / 1e6, 1),
            "GFLOP/s": round(2 * rows * times.weights.get(part, 0) / ms / 1e6),
        }
        for part, ms in sorted(took.items(), key=lambda each: -each[1])
        if ms >= _LEAST_MS
    ]


def beside(row: Row, machine: Machine, checkpoint: str, precision: Precision) -> Row:
    """The row with what the machine's rates allow."""
    rows, context, ms = int(row["rows"]), int(row["context"]), float(row["ms"])
    parameters = matrix_parameters(checkpoint)
    head = int(SHAPES[checkpoint]["vocab_size"] * SHAPES[checkpoint]["hidden_size"])
    if context:
        products = 2 * parameters * rows
        # One token sees all of its context, twice what a prompt of that length does on average.
        attention = 2 * attention_operations(checkpoint, context) * rows // context
        kv_values = kv_values_per_token(checkpoint) * context * rows
    else:
        products = 2 * (parameters - head) * rows + 2 * head
        attention, kv_values = attention_operations(checkpoint, rows), 0
    num_bytes = parameters * precision.weight_bytes + kv_values * precision.kv_bytes
    read_ms = 1e3 * num_bytes / machine.read_bytes_per_s
    multiply_ms = 1e3 * (products / precision.flops_per_s(machine) + attention / machine.bfloat16_flops_per_s)
    shown = {name: value for name, value in row.items() if name not in {"rows", "others"}}
    return shown | {
        "baseline: read ms": read_ms,
        "baseline: multiply ms": multiply_ms,
        "share %": 100 * max(read_ms, multiply_ms) / ms,
        "GB/s": num_bytes / ms / 1e6,
        "of GB/s": machine.read_bytes_per_s / 1e9,
        "GFLOP/s": (products + attention) / ms / 1e6,
        "of GFLOP/s": precision.flops_per_s(machine) / 1e9,
        "others": row["others"],
    }


def _pair(text: str) -> tuple[int, int]:
    rows, _, chunk = text.partition("+")
    return int(rows), int(chunk)


def _asked() -> argparse.Namespace:
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--ours", choices=sorted(OURS), default="bf16")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence before its first step")
    mixed = [(8, 64), (8, 256), (32, 256)]
    parser.add_argument("--mixed", nargs="*", type=_pair, default=mixed, help="answers+tokens of a prompt")
    parser.add_argument("--parts", nargs="*", type=int, default=[1, 32], help="rows of the third table")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    arguments = parser.parse_args()
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers, which makes the checkpoint, is not installed: run `make dev`")
    return arguments


def main() -> None:
    """The tables."""
    arguments = _asked()
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def tell(*said: object) -> None:
        print(f"{time.perf_counter() - began:4.0f} s", *said, flush=True)

    hold_this_process()
    tell("compiling kernels if need be, measuring memory and products, making the checkpoint in", folder)
    before = measure_machine(rows=_RATE_ROWS)
    tell(f"memory reads {before.read_bytes_per_s / 1e9:.1f} GB/s")
    bench = Bench(make_checkpoint(arguments.checkpoint, folder), arguments.ours)
    # As the core does before it serves.
    gc.collect()
    gc.freeze()
    rows: list[Row] = []
    bench.run(1, 16, 4)
    works = [partial(prompt_row, bench, count) for count in arguments.prompts]
    works += [partial(step_row, bench, count, arguments.context) for count in arguments.rows]
    for work in works:
        found = work()
        after = measure_machine(rows=_RATE_ROWS)
        rows.append(beside(found, before.best(after), arguments.checkpoint, bench.precision))
        tell(f"{rows[-1]['work']}: {rows[-1]['ms']:.4g} ms, {rows[-1]['share %']:.0f} %")
        before = after
    mixed: list[Row] = []
    for count, chunk in arguments.mixed:
        mixed.append(_mixed(bench, count, arguments.context, chunk))
        tell(mixed[-1])
    parts = [row for count in arguments.parts for row in part_rows(bench, count, arguments.context)]
    notes = f"{arguments.checkpoint}, {arguments.ours}, level {bench.level}, {os.cpu_count()} CPUs"
    tables = {
        "": ("Steps and prompts beside the machine's rates", rows),
        "_mixed": ("Prompts beside answers", mixed),
        "_parts": ("Where a decode step goes, medians in ms", parts),
    }
    for ending, (title, table) in tables.items():
        path = arguments.json and arguments.json.with_stem(arguments.json.stem + ending)
        if table:
            publish(title, table, path, notes)
    bench.runner.close()


if __name__ == "__main__":
    main()
