"""What adapters in a batch cost: steps with 1, 8 and 32 of them beside steps of the plain model.

The runner over a checkpoint with random weights, and random adapters of every linear layer, as many sequences
as are named: rows take turns with the adapters, and every sequence decodes in every step. The baseline is the
same sequences without any; the kinds take turns, and each has the median of its steps. The second table is
prompts of 512 tokens, one for each adapter (for the baseline, as many without) in one step.

    python -m benchmarks.engine.adapters [--checkpoint llama-40m] [--dtype bfloat16] [--sequences 8 32]
        [--rank 16] [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from benchmarks.engine.report import Row, publish
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from engine.adapters.peft import Module
from engine.config import AdaptersConfig, CacheConfig, EngineConfig, SchedulerConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from runtime.config import ModelConfig

_KINDS = (0, 1, 8, 32)
_PROMPT, _LONG_PROMPT, _NUM_STEPS, _ROUNDS = 64, 512, 24, 5
_BLOCK = 16
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1 << 20)


def write_adapter(folder: Path, modules: Mapping[str, Module], *, rank: int, seed: int) -> Path:
    """A random adapter of all modules, as PEFT writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(seed)
    tensors = {}
    for name, module in modules.items():
        for part, shape in (("A", (rank, module.inputs)), ("B", (module.outputs, rank))):
            values = 0.01 * draw.standard_normal(shape, np.float32)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = values
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in modules})
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(values | {"target_modules": targets}))
    return folder


class Batch:
    """Sequences of one runner, step by step."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self._runner = runner
        self._random = random.Random(0)
        self._vocab_size = vocab_size
        self._steps, self._ids = itertools.count(), itertools.count(1)

    def prompts(self, slots: list[int], length: int, room: int) -> tuple[list[int], float]:
        """Begins a sequence for each slot; its ids, and the seconds that their prompts took in one step."""
        blocks = iter(range(self._runner.storage.num_blocks))
        new, rows = [], []
        for slot in slots:
            sequence_id = next(self._ids)
            ids = tuple(self._random.randrange(1, self._vocab_size) for _ in range(length))
            own = tuple(itertools.islice(blocks, -(-(length + room) // _BLOCK)))
            new.append(NewSequence(sequence_id, ids, length, _SAMPLING, 0, None, "", own, slot))
            rows.append(ScheduledSequence(sequence_id, 0, length, (), True))
        taken = self._step(SchedulerOutput(next(self._steps), tuple(new), tuple(rows)))
        return [each.sequence_id for each in new], taken

    def decode(self, ids: list[int], start: int, num_steps: int) -> list[float]:
        """Seconds of each step in which all of them go on by a token."""
        return [
            self._step(
                SchedulerOutput(
                    next(self._steps),
                    (),
                    tuple(ScheduledSequence(each, start + step, 1, (), True) for each in ids),
                )
            )
            for step in range(num_steps)
        ]

    def end(self, ids: list[int]) -> None:
        """Forgets them."""
        self._step(SchedulerOutput(next(self._steps), released=tuple(ids)))

    def _step(self, plan: SchedulerOutput) -> float:
        began_s = time.perf_counter()
        result = self._runner.launch(plan).wait()
        assert not result.failure, result.failure
        return time.perf_counter() - began_s


def decode_rows(batch: Batch, num_sequences: int) -> Iterator[Row]:
    """Decode steps of so many sequences with each number of adapters, in turns."""
    found: dict[int, list[float]] = {kind: [] for kind in _KINDS if kind <= num_sequences}
    for _ in range(_ROUNDS):
        for kind, steps in found.items():
            slots = [index % kind if kind else -1 for index in range(num_sequences)]
            ids, _ = batch.prompts(slots, _PROMPT, _NUM_STEPS)
            # The first is put together as a whole.
            steps.extend(batch.decode(ids, _PROMPT, _NUM_STEPS)[2:])
            batch.end(ids)
    plain = median(found[0])
    for kind, steps in found.items():
        yield {
            "sequences": num_sequences,
            "adapters": kind or "none (baseline)",
            "ms a step": 1e3 * median(steps),
            "tokens/s": num_sequences / median(steps),
            "of none": plain / median(steps),
        }


def prompt_rows(batch: Batch, num_prompts: int) -> Iterator[Row]:
    """Prompts with an adapter each, and without, in turns."""
    found: dict[str, list[float]] = {"none (baseline)": [], "one each": []}
    for _ in range(_ROUNDS):
        for kind, seconds in found.items():
            slots = [-1 if kind != "one each" else index for index in range(num_prompts)]
            ids, taken = batch.prompts(slots, _LONG_PROMPT, 1)
            seconds.append(taken)
            batch.end(ids)
    for kind, seconds in found.items():
        yield {
            "prompts": num_prompts,
            "adapters": kind,
            "ms": 1e3 * median(seconds),
            "tokens/s": num_prompts * _LONG_PROMPT / median(seconds),
            "of none": median(found["none (baseline)"]) / median(seconds),
        }


def open_adapted(folder: Path, scratch: Path, asked: argparse.Namespace) -> ModelRunner:
    """A runner whose slots hold random adapters."""
    config = EngineConfig(
        dtype=asked.dtype,
        native="required",
        max_model_len=1024,
        cache=CacheConfig(block_size=_BLOCK, kv_cache_bytes=256 << 20),
        scheduler=SchedulerConfig(max_num_batched_tokens=8 * _LONG_PROMPT),
        adapters=AdaptersConfig(slots=max(_KINDS), max_rank=asked.rank),
    )
    runner, _, _ = build_here(config, ModelConfig(path=str(folder)), lambda stage, part: None)
    adapters = runner.adapters
    for slot in range(max(_KINDS)):
        name = f"a{slot}"
        made = write_adapter(scratch / name, adapters.modules, rank=asked.rank, seed=slot)
        adapters.add(name, str(made))
        adapters.begin(slot, name)
    missing = max(_KINDS)
    while missing:
        for _, problem in adapters.finished():
            assert not problem, problem
            missing -= 1
        time.sleep(0.01)
    return runner


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", choices=SHAPES, default="llama-40m")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sequences", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args()
    folder = make_checkpoint(asked.checkpoint, asked.environments / "checkpoints")
    with tempfile.TemporaryDirectory() as scratch:
        runner = open_adapted(folder, Path(scratch), asked)
        batch = Batch(runner, runner.model.spec.vocab_size)
        title = f"{asked.checkpoint} in {asked.dtype}, adapters of rank {asked.rank}"
        rows = [row for count in asked.sequences for row in decode_rows(batch, count)]
        publish(f"Decode steps of {title}", rows, asked.json)
        publish(f"Prompts of {_LONG_PROMPT} tokens, {title}", list(prompt_rows(batch, 4)), None)
        runner.close()


if __name__ == "__main__":
    main()
