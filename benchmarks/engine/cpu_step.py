"""Where a step on a CPU goes, and how fast prompts are computed beside the machine's own rates.

The real loop, scheduler and runner over a checkpoint with random weights, messages encoded as for the front;
no other process takes part. The baseline puts every step together anew; the two take turns, and only steps
in which all sequences decode count, so that both see contexts of the same length ("context": tokens).
"native" is the time inside the kernels, "read" that of the weights alone at the memory's measured rate (a
last cache that holds them is faster). The second table says to which ops that time goes (products by outputs
x inputs) and at what rate they read and multiply. The third is a prompt of 2,048 tokens, beside the measured
rate of multiplication, attention's operations counted; rates are the better of two measurements, before and
after. "others" says how many CPUs other programs took meanwhile: above 0.05, measure again. Lines say what
was found as it goes; tables follow. NATIVE_KERNELS_LEVEL forces a level of instructions below the machine's
best. Needs what `make dev` installs: transformers makes the checkpoint.

    python -m benchmarks.engine.cpu_step [--checkpoint llama-40m] [--ours bf16] [--sequences 1 32]
        [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import random
import time
from collections import defaultdict
from contextlib import nullcontext
from ctypes import c_int64
from pathlib import Path
from statistics import median
from unittest.mock import patch

import msgspec
import psutil

from benchmarks.engine.host_time import _Watch
from benchmarks.engine.overlap import _Mailbox
from benchmarks.engine.report import Row, publish
from benchmarks.peers.checkpoints import (
    SHAPES,
    attention_operations,
    make_checkpoint,
    matrix_parameters,
)
from benchmarks.peers.roofline import Machine, measure_machine
from benchmarks.peers.tables import OURS, precision_of
from engine.config import EngineConfig
from engine.core.__main__ import make_scheduler
from engine.core.loop import EngineLoop
from engine.model.native_decoder import NativeDecoder
from engine.runner.base import PendingStep
from engine.runner.build import build_here
from engine.runner.executors.executor import FollowingSteps
from engine.runner.runner import ModelRunner
from engine.types import Request, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native import Op
from kernels.native.library import Program
from runtime.config import ModelConfig

_PROMPT = 256
_NUM_TOKENS = 128
_LONG_PROMPT = 2048
_ROUNDS = 3
# No round of both kinds of steps begins that would end later than this.
_ROUNDS_S = 20.0
# Rows of the products that show the machine's rate: torch's may run at a hundredth of it.
RATE_ROWS = 512
_KV_BYTES = 2 << 30
# Whether each kind of steps is put together anew.
_ANEW = {"baseline: anew": True, "ours": False}
# Ops that take less of a step are left out.
_LEAST_MS = 0.01


class _OpTimes:
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

    def rows(self, num_tokens: int, weight_bytes: float) -> list[Row]:
        """Medians over forwards of so many tokens, most first."""
        found = [times for count, times in self.forwards if count == num_tokens]
        medians = {name: median(times.get(name, 0.0) for times in found) for name in found[-1]}
        total = sum(medians.values())
        return [
            {
                "sequences": num_tokens,
                "op": name,
                "ms": round(ms, 3),
                "share %": round(100 * ms / total, 1),
                "GB/s": round(self.weights.get(name, 0) * weight_bytes / ms / 1e6, 1),
                "GFLOP/s": round(2 * num_tokens * self.weights.get(name, 0) / ms / 1e6),
            }
            for name, ms in sorted(medians.items(), key=lambda each: -each[1])
            if ms >= _LEAST_MS
        ]


def _name_of(op: Op) -> str:
    return f"{op.args.weight.outputs} x {op.args.weight.inputs}" if op.name == "gemm" else op.name


class Bench:
    """One loaded checkpoint, driven in this process."""

    def __init__(self, checkpoint: str, precision: str, folder: Path) -> None:
        self.checkpoint, self.precision = checkpoint, precision
        settings: dict[str, object] = {"max_model_len": 4096}
        for name, value in {**OURS[precision][0], "cache.kv_cache_bytes": _KV_BYTES}.items():
            section, _, key = name.rpartition(".")
            if section:
                nested = settings.setdefault(section, {})
                assert isinstance(nested, dict)
                nested[key] = value
            else:
                settings[key] = value
        self.config = msgspec.convert(settings, EngineConfig)
        self.model = ModelConfig(path=str(make_checkpoint(checkpoint, folder)))
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
        self._random = random.Random(0)

    def run(self, num_sequences: int, prompt: int, num_tokens: int) -> tuple[float, float]:
        """Seconds of greedy answers to so many random prompts at once, and CPUs that others took. The watch
        keeps the steps in which all of them decode.
        """
        scheduler = make_scheduler(self.config, self.model, self.memory, self.facts)
        mailbox = _Mailbox([self._request(index, prompt, num_tokens) for index in range(num_sequences)])
        loop = EngineLoop(scheduler, self.runner, mailbox)
        self.watch.around(scheduler, "schedule", "plan")
        self.watch.around(scheduler, "update", "results")
        self.watch.around(mailbox, "send", "publish")
        began, busy, own = time.perf_counter(), _busy_s(), time.process_time()
        while mailbox.num_ended < num_sequences:
            self._plan = None
            with self.watch.during("step"):
                loop.step()
            if decoding := self._decoding(num_sequences):
                self.watch.end_step()
                self.watch.parts["context"].append(1 + sum(each.start for each in decoding) / num_sequences)
            else:
                self.watch.drop_step()
        seconds = time.perf_counter() - began
        # The runner forgets the last sequences.
        loop.step()
        others = (_busy_s() - busy - (time.process_time() - own)) / seconds
        return seconds, max(0.0, others)

    def beside(self, num_sequences: int, prompt: int, num_tokens: int, chunk: int, num_chunks: int) -> float:
        """Seconds that so many sequences take from the first step in which all of them decode to their end,
        while in each of the first `num_chunks` of these steps a prompt of `chunk` tokens is computed whole.
        """
        whole = msgspec.structs.replace(self.config.scheduler, step_target_ms=0.0)
        config = msgspec.structs.replace(self.config, scheduler=whole)
        scheduler = make_scheduler(config, self.model, self.memory, self.facts)
        mailbox = _Mailbox([self._request(index, prompt, num_tokens) for index in range(num_sequences)])
        loop, began, num_asked = EngineLoop(scheduler, self.runner, mailbox), 0.0, 0
        while mailbox.num_ended < num_sequences + num_chunks:
            if began and num_asked < num_chunks:
                mailbox.submit(self._request(num_sequences + num_asked, chunk, 1))
                num_asked += 1
            self._plan = None
            loop.step()
            if self._decoding(num_sequences):
                began = began or time.perf_counter()
        seconds = time.perf_counter() - began
        loop.step()
        self.watch.drop_step()
        return seconds

    def _decoding(self, num_sequences: int) -> tuple[ScheduledSequence, ...]:
        """What the last step computed, if so many sequences decoded in it and nothing else was computed."""
        scheduled = self._plan.scheduled if self._plan else ()
        alone = len(scheduled) == num_sequences and all(each.num_tokens == 1 for each in scheduled)
        return scheduled if alone else ()

    def _request(self, number: int, prompt: int, num_tokens: int) -> Request:
        return Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=tuple(self._random.randrange(300, 30_000) for _ in range(prompt)),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        )

    def decode_rows(self, num_sequences: int, machine: Machine) -> list[Row]:
        """Medians of the parts of a step in microseconds, of both kinds in turns."""
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in _ANEW}
        parts: dict[str, defaultdict[str, list[float]]] = {name: defaultdict(list) for name in _ANEW}
        for name in _ANEW:
            self._run_as(name, num_sequences, 16, 8)
        began = round_began = time.perf_counter()
        for turn in range(_ROUNDS):
            last, round_began = time.perf_counter() - round_began, time.perf_counter()
            if turn and round_began + last > began + _ROUNDS_S:
                break
            for name in sorted(_ANEW, reverse=turn % 2 == 1):
                self.watch.parts = parts[name]
                runs[name].append(self._run_as(name, num_sequences, _PROMPT, _NUM_TOKENS))
        rows = []
        for name in _ANEW:
            self.watch.parts = parts[name]
            rows.append(self._decode_row(num_sequences, machine, name, runs[name]))
        return rows

    def _run_as(self, name: str, num_sequences: int, prompt: int, num_tokens: int) -> tuple[float, float]:
        anew = patch.object(FollowingSteps, "follows", lambda steps, scheduled: None)
        with anew if _ANEW[name] else nullcontext():
            return self.run(num_sequences, prompt, num_tokens)

    def _decode_row(
        self, num_sequences: int, machine: Machine, name: str, runs: list[tuple[float, float]]
    ) -> Row:
        weights = matrix_parameters(self.checkpoint) * precision_of(f"millrace-{self.precision}").weight_bytes
        row: dict[str, str | float | int] = {"sequences": num_sequences, "steps": name}
        row["context"] = round(median(self.watch.parts["context"]))
        for part in ("plan", "launch", "native", "results", "publish", "step"):
            row[f"{part} us"] = round(self.watch.median_us(part), 1)
        host = self.watch.median_us("step") - self.watch.median_us("native")
        return row | {
            "not native us": round(host, 1),
            "read us": round(weights / machine.read_bytes_per_s * 1e6, 1),
            "tokens/s": median(num_sequences * _NUM_TOKENS / seconds for seconds, _ in runs),
            "others": round(max(others for _, others in runs), 2),
        }

    def op_rows(self, num_sequences: int) -> list[Row]:
        """What each kind of op takes of a step in which so many sequences decode."""
        times = _OpTimes()

        def timed(program: Program, pool: int) -> None:
            times.run(program, pool)

        with patch.object(Program, "run", timed):
            self.run(num_sequences, _PROMPT, _NUM_TOKENS)
        return times.rows(num_sequences, precision_of(f"millrace-{self.precision}").weight_bytes)

    def prefill_row(self, machine: Machine) -> Row:
        """A long prompt: tokens per second, and operations per second beside the machine's."""
        self.run(1, _LONG_PROMPT, 1)
        runs = [self.run(1, _LONG_PROMPT, 1) for _ in range(_ROUNDS)]
        shape, seconds = SHAPES[self.checkpoint], min(seconds for seconds, _ in runs)
        layers = matrix_parameters(self.checkpoint) - shape["vocab_size"] * shape["hidden_size"]
        operations = 2 * layers * _LONG_PROMPT + attention_operations(self.checkpoint, _LONG_PROMPT)
        rate = precision_of(f"millrace-{self.precision}").flops_per_s(machine)
        return {
            "prompt": _LONG_PROMPT,
            "seconds": seconds,
            "tokens/s": _LONG_PROMPT / seconds,
            "TFLOP/s": operations / seconds / 1e12,
            "baseline: products TFLOP/s": rate / 1e12,
            "share %": 100 * operations / seconds / rate,
            "others": round(max(others for _, others in runs), 2),
        }


def _busy_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


def require_transformers(parser: argparse.ArgumentParser) -> None:
    """Ends with the remedy where what makes the checkpoint is missing."""
    if importlib.util.find_spec("transformers") is None:
        parser.error("transformers, which makes the checkpoint, is not installed: run `make dev`")


def main() -> None:
    """Both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", choices=sorted(SHAPES), default="llama-40m")
    parser.add_argument("--ours", choices=sorted(OURS), default="bf16")
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    require_transformers(parser)
    folder = arguments.environments.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def tell(*said: object) -> None:
        print(f"{time.perf_counter() - began:4.0f} s", *said, flush=True)

    tell("compiling kernels if need be, measuring memory and products, making the checkpoint in", folder)
    machine = measure_machine(rows=RATE_ROWS)
    tell(f"memory reads {machine.read_bytes_per_s / 1e9:.1f} GB/s")
    bench = Bench(arguments.checkpoint, arguments.ours, folder)
    # As the core does before it serves.
    gc.collect()
    gc.freeze()
    prefill = bench.prefill_row(machine)
    tell(prefill)
    decode: list[Row] = []
    ops: list[Row] = []
    for count in arguments.sequences:
        for row in bench.decode_rows(count, machine):
            decode.append(row)
            tell(row)
        found = bench.op_rows(count)
        tell(", ".join(f"{row['op']} {row['ms']} ms" for row in found))
        ops += found
    machine = machine.best(measure_machine(rows=RATE_ROWS))
    rate = precision_of(f"millrace-{arguments.ours}").flops_per_s(machine)
    measured = float(prefill["TFLOP/s"])
    prefill = {**prefill, "baseline: products TFLOP/s": rate / 1e12, "share %": 100e12 * measured / rate}
    notes = (
        f"{arguments.checkpoint}, {arguments.ours}, level {bench.level}, {os.cpu_count()} CPUs, "
        f"memory read at {machine.read_bytes_per_s / 1e9:.1f} GB/s"
    )
    publish("A decode step on the CPU, medians", decode, arguments.json, notes)
    ops_json = arguments.json and arguments.json.with_stem(f"{arguments.json.stem}_ops")
    publish("Where a decode step's kernels spend it, medians in ms", ops, ops_json, notes)
    prefill_json = arguments.json and arguments.json.with_stem(f"{arguments.json.stem}_prefill")
    publish("A prompt of 2,048 tokens, best of three", [prefill], prefill_json, notes)
    bench.runner.close()


if __name__ == "__main__":
    main()
