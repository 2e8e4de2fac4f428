"""How long the first write to blocks of the cache takes, when the system still has to find their memory.

Baseline: a cache whose memory is given when a step writes there. Ours is had ahead of its use, while
nothing runs (engine/runner/kv_storage.py). Both are made anew in each round, on a CPU, and left alone for
a while; then the blocks of one prompt after another are written in every layer, as steps do. On a virtual
machine the figures depend on whether the host has the memory at hand; medians and the longest of the rounds.

    python -m benchmarks.engine.first_write [--json OUT]
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import msgspec
import torch

from benchmarks.engine.report import Row, arguments, publish
from engine.model.families import read_spec
from engine.model.spec import ModelSpec
from engine.runner.kv_storage import KvStorage
from engine.types import NewSequence, SamplingParams, SchedulerOutput

_ROUNDS = 3
_IDLE_S = 3.0
_AHEAD_BLOCKS = 128
# Prompts of 256 tokens, and the block that an answer begins with.
_BLOCKS_PER_PROMPT = 17
_NUM_PROMPTS = 7


def write_ms(spec: ModelSpec, ahead_blocks: int) -> list[float]:
    """Milliseconds of writing each prompt's blocks to a new cache."""
    storage = KvStorage(
        spec,
        num_blocks=1024,
        block_size=16,
        kv_dtype="bfloat16",
        device=torch.device("cpu"),
        ahead_blocks=ahead_blocks,
    )
    tensors = [tensor for layer in storage.layers for tensor in layer.tensors()]
    spent = []
    try:
        time.sleep(_IDLE_S)
        for number in range(_NUM_PROMPTS):
            blocks = tuple(range(number * _BLOCKS_PER_PROMPT, (number + 1) * _BLOCKS_PER_PROMPT))
            new = NewSequence(number, (), 0, SamplingParams(), 0, None, "", blocks)
            storage.apply(SchedulerOutput(step_id=number, new_sequences=(new,)))
            began = time.perf_counter()
            for tensor in tensors:
                tensor[blocks[0] : blocks[-1] + 1].zero_()
            spent.append(1000 * (time.perf_counter() - began))
    finally:
        storage.close()
    return spent


def main() -> None:
    """Both sides in turn, over the shape of a 0.6-billion-parameter model's cache."""
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    spec = msgspec.structs.replace(
        read_spec(Path("models/millrace-nano")), num_layers=28, num_kv_heads=8, head_dim=128
    )
    sides = {"baseline: when written": 0, "ours: ahead": _AHEAD_BLOCKS}
    spent: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(_ROUNDS):
        for name, ahead_blocks in sides.items():
            spent[name] += write_ms(spec, ahead_blocks)
    rows: list[Row] = [
        {"memory": name, "prompt ms, median": median(values), "longest ms": max(values)}
        for name, values in spent.items()
    ]
    publish(f"First writes of {_BLOCKS_PER_PROMPT} blocks of a cache", rows, options.json)


if __name__ == "__main__":
    main()
