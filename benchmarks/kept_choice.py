"""What it costs to keep the tokens of a prompt that were voted for, behind the prompt's last step.

    python -m benchmarks.kept_choice [--tokens 1000 2000 8000] [--keep 0.5] [--rounds 7] [--json OUT]

Caches of SmolLM2-135M's and of a 0.6 B model's shape, votes of chance, one thread. `choose ms` is all that
happens to a prompt: ranking, and copying into fresh blocks, layer by layer. Beside it, in turns: `ranking ms`
of these; and `copy ms`, which is how long as many whole blocks take that lie in order.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.engine.report import Row, options, publish
from contract.retention import Retention
from engine.runner.forgotten.votes import Votes, choose, chosen_of
from engine.types import ChosenTokens, KeptBlocks
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP, HostCache, allocate_host_layer

_BLOCK_SIZE = 16
# Layers, kv heads and their elements.
SHAPES = {"SmolLM2-135M": (30, 3, 64), "0.6 B": (28, 8, 128)}


def measured(shape: tuple[int, int, int], type_name: str, num_tokens: int, keep: float, rounds: int) -> Row:
    """Medians, in milliseconds."""
    num_layers, num_kv, dim = shape
    size = KEY_GROUP if type_name == BY_CHANNEL else _BLOCK_SIZE
    kept = KeptBlocks.of(Retention(policy="h2o", keep=keep), num_tokens, size)
    assert isinstance(kept, ChosenTokens), "something is forgotten"
    num_blocks = kept.num_whole + kept.num_fresh
    layers = [
        allocate_host_layer(
            num_blocks=num_blocks,
            block_size=size,
            num_heads=num_kv,
            key_dim=dim,
            value_dim=dim,
            shared_value_dim=0,
            type_name=type_name,
        )
        for _ in range(num_layers)
    ]
    for layer in layers:
        for tensor in layer.tensors():
            # Memory that nobody touched is not there.
            tensor[:] = 1
    fresh, random = np.arange(kept.num_whole, num_blocks), np.random.default_rng(0)
    order = random.permutation(kept.num_whole)
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        votes = Votes(kept, fresh.tolist())
        votes.sums = random.integers(0, 1 << 40, (num_layers * num_kv, kept.num_whole * size))
        table = np.concatenate((order, fresh))
        times.append(
            (
                _timed(lambda votes=votes, table=table: choose(votes, table, layers, num_blocks, None)),
                _timed(lambda votes=votes: chosen_of(votes.sums, kept)),
                _timed(lambda: _copied(layers, len(fresh))),
            )
        )
    chosen, ranked, copied = (1e3 * median(each) for each in zip(*times, strict=True))
    return {"choose ms": chosen, "ranking ms": ranked, "copy ms": copied}


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _copied(layers: list[HostCache], count: int) -> None:
    for layer in layers:
        for tensor in layer.tensors():
            tensor[-count:] = tensor[:count]


def main() -> None:
    """Prints one row for each shape, type of keys and values, and length."""
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=(1000, 2000, 8000))
    parser.add_argument("--keep", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    rows: list[Row] = [
        {"shape": name, "keys and values": type_name, "prompt": num_tokens}
        | measured(shape, type_name, num_tokens, given.keep, given.rounds)
        for name, shape in SHAPES.items()
        for type_name in ("bfloat16", "int8", BY_CHANNEL)
        for num_tokens in given.tokens
    ]
    publish("What a choice of tokens costs", rows, given.json, f"{given.keep:g} of each prompt stays.")


if __name__ == "__main__":
    main()
