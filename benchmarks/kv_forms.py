"""What the forms of keys and values cost and give: bytes a token, streams in 4 GiB, and the rate of decoding.

    python -m benchmarks.kv_forms [--checkpoint qwen3-0.6b] [--contexts 2048 8192 32768] [--rows 1]
        [--forms bfloat16 int8 fp8 kivi4] [--steps 16] [--rounds 3] [--threads 2] [--json OUT]

Sequences decode over histories of random keys and values that nobody computed: a step reads what it would
read of real ones. The forms take turns, `rounds` times; a rate is tokens of all rows over the median step of
the best round. Streams are of 8,192 tokens each, of which memory holds keys and values alone, with the
keys that `kivi4` has whole beside. bfloat16 is the baseline. Weights are random, and the shapes have
positions for every context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.engine.report import Row, options, publish
from benchmarks.peers.checkpoints import SHAPES, make_checkpoint
from engine.config import CacheConfig, EngineConfig
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token, recent_bytes
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from runtime.config import ModelConfig

FORMS = ("bfloat16", "int8", "fp8", "kivi4")
MEMORY_BYTES = 4 << 30
STREAM_TOKENS = 8192
# Positions that the shapes are given, whatever their models were trained on.
LONGEST = 1 << 16
WARM_UP_STEPS = 2
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)


def main() -> None:
    """Prints one row per form."""
    parser = options(__doc__)
    parser.add_argument("--checkpoint", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--folder", type=Path, default=Path("build/peers"))
    parser.add_argument("--forms", choices=FORMS, nargs="+", default=FORMS)
    parser.add_argument("--contexts", type=int, nargs="+", default=(2048, 8192, 32768))
    for name, value in (("rows", 1), ("steps", 16), ("rounds", 3), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    name = f"{arguments.checkpoint}-long"
    shape = SHAPES[arguments.checkpoint] | {"max_position_embeddings": LONGEST}
    folder = make_checkpoint(name, arguments.folder, {name: shape})
    spec = read_spec(folder)
    rates: dict[tuple[str, int], float] = {}
    for _ in range(arguments.rounds):
        for form in arguments.forms:
            for context in arguments.contexts:
                with _runner(folder, form, arguments.rows, context, arguments.threads) as runner:
                    rate = arguments.rows / median(_steps(runner, arguments.rows, context, arguments.steps))
                rates[form, context] = max(rate, rates.get((form, context), 0.0))
    rows: list[Row] = []
    for form in arguments.forms:
        per_token = kv_bytes_per_token(spec, form)
        stream_bytes = per_token * STREAM_TOKENS + recent_bytes(spec, form, 1)
        row: dict[str, str | float | int] = {
            "form": form,
            "bytes a token": per_token,
            "streams in 4 GiB": MEMORY_BYTES // stream_bytes,
        }
        for context in arguments.contexts:
            row[f"tokens/s at {context}"] = rates[form, context]
            row[f"times the first at {context}"] = rates[form, context] / rates[arguments.forms[0], context]
        rows.append(row)
    notes = f"{arguments.rows} sequences decode at once, {arguments.threads} threads."
    publish(f"Forms of keys and values, {arguments.checkpoint}", rows, arguments.json, notes)


@contextmanager
def _runner(folder: Path, form: str, rows: int, context: int, threads: int) -> Iterator[ModelRunner]:
    """Whose cache holds random numbers."""
    spec = read_spec(folder)
    size = (context + 64) * rows * kv_bytes_per_token(spec, form) * 17 // 16
    cache = CacheConfig(
        kv_cache_bytes=size,
        kv_dtype=form,  # type: ignore[arg-type]
        block_size=KEY_GROUP if form == BY_CHANNEL else 16,
        prefix_caching=False,
    )
    config = EngineConfig(dtype="bfloat16", cache=cache, max_model_len=context + 64, num_threads=threads)
    runner, _, _ = build_here(config, ModelConfig(path=str(folder)), lambda phase, part: None)
    assert isinstance(runner, ModelRunner)
    drawn = np.random.default_rng(0)
    try:
        for layer in runner.storage.layers:
            newest = getattr(layer, "recent", None)
            for part in (*layer.tensors(), *(() if newest is None else (newest,))):
                _fill(np.asarray(part), drawn)
        yield runner
    finally:
        runner.close()


def _fill(part: np.ndarray, drawn: np.random.Generator) -> None:
    """Random levels, scales near a hundredth, bits of bfloat16 of numbers near one."""
    for block in part:
        if part.dtype == np.float32:
            block[...] = drawn.random(block.shape, np.float32) * 0.01 + 0.005
        elif part.dtype == np.uint16:
            block[...] = drawn.integers(0x3E00, 0x3FC0, block.shape, np.uint16)
        else:
            # As float8 numbers from 1 to 240: neither NaN nor the least ones, which real vectors hardly have.
            block[...] = drawn.integers(0x38, 0x78, block.shape, np.uint8).view(part.dtype)


def _steps(runner: ModelRunner, rows: int, context: int, steps: int) -> list[float]:
    """Seconds of each step in which all rows decode behind a history of `context` tokens."""
    block_size = runner.storage.block_size
    each = -(-(context + 64) // block_size)
    assert steps + WARM_UP_STEPS < 64, "the history has room for so many steps"
    new = tuple(
        NewSequence(
            row, (1,) * context, context, _SAMPLING, 0, None, "", tuple(range(row * each, (row + 1) * each))
        )
        for row in range(rows)
    )
    taken = []
    for step in range(steps + WARM_UP_STEPS):
        scheduled = tuple(ScheduledSequence(row, context - 1 + step, 1, (), True, ()) for row in range(rows))
        began = time.perf_counter()
        runner.launch(SchedulerOutput(step, new if step == 0 else (), scheduled)).wait()
        taken.append(time.perf_counter() - began)
    return taken[WARM_UP_STEPS:]


if __name__ == "__main__":
    main()
