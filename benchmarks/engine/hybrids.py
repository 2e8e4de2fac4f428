"""Models whose layers carry a state, on a CPU: steps and prompts, and what is left of a prefix that was seen.

Checkpoints with random weights in the shapes of Qwen3-Next (gated delta rule, attention in every fourth
layer, 32 experts) and Granite 4 (Mamba 2), driven by the real loop, scheduler and runner in this process. The
first table has a step in which so many sequences decode beside what reading allows: the weights that it
multiplies with (of experts as many as so many tokens choose on average when they choose at random) at two
bytes each, the states once, and cached keys and values, at the rate at which memory was read just before and
just after. "packed %" is the same with weights of as few bits as our products read. Prompts have no such
bound and stand there as tokens a second. The second table says to which ops a prompt and a step go.

The third is the time to the first token of a prompt that nobody has sent, and of those with the same first
tokens and other last ones: the second prompt is computed from the last copy of a state before both part, and
leaves one there, the third and those after it begin there. Medians over prefixes.

NATIVE_KERNELS_LEVEL forces a level of instructions. Needs what `make dev` installs.

    python -m benchmarks.engine.hybrids [--checkpoint qwen3-next-small granite-4-small] [--ours bf16]
        [--rows 1 8 32] [--prompts 512 2048] [--context 64] [--prefix 2000] [--tail 40] [--rounds 3]
        [--environments DIR] [--json OUT]
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engine.cpu_step import Bench, OpTimes, prompt_row, step_row
from benchmarks.engine.report import Row, options, publish
from benchmarks.peers.checkpoints import make_checkpoint
from benchmarks.peers.levels import hold_this_process
from benchmarks.peers.roofline import Machine, measure_machine
from benchmarks.peers.tables import OURS
from engine.config import EngineConfig
from engine.model.checkpoint import read_headers
from engine.model.plan import PlanInput, plan_input
from engine.model.spec import TensorHeader
from runtime.config import ModelConfig

_COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 32_000,
    "tie_word_embeddings": True,
    "max_position_embeddings": 4096,
}
_EVERY_FOURTH = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-next-small": _COMMON
    | {
        "model_type": "qwen3_next",
        "num_hidden_layers": 12,
        "layer_types": _EVERY_FOURTH,
        "head_dim": 128,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "intermediate_size": 2048,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "granite-4-small": _COMMON
    | {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 12,
        "layer_types": _EVERY_FOURTH,
        "num_local_experts": 0,
        "shared_intermediate_size": 3072,
        "intermediate_size": 3072,
        "mamba_n_heads": 32,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "residual_multiplier": 0.25,
        "attention_multiplier": 1 / 128,
    },
}
_RATE_ROWS = 512
# Followers of a prefix beyond the second prompt.
_NUM_FOLLOWERS = 3
_LEAST_MS = 0.01
_CHOSEN_LAYERS = ".experts."
_LOOKED_UP = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


def weights_read(given: PlanInput, headers: Mapping[str, TensorHeader], num_tokens: int) -> float:
    """Weights that a step of so many tokens multiplies with; of the head those of ids that have a token."""
    spec = given.spec
    experts, total = spec.experts, float(spec.vocab_size * spec.hidden_size)
    for name, header in headers.items():
        if len(header.shape) < 2 or name in (_HEAD, _LOOKED_UP):
            continue
        count = float(header.num_elements)
        if experts is not None and _CHOSEN_LAYERS in name:
            count *= 1 - (1 - experts.num_active / experts.num_experts) ** num_tokens
        total += count
    return total


def _beside(row: Row, machine: Machine, given: PlanInput, headers: Mapping[str, TensorHeader]) -> Row:
    """A step with what reading takes at the machine's rate; the rate of a prompt."""
    rows, context, ms = int(row["rows"]), int(row["context"]), float(row["ms"])
    shown: dict[str, str | float | int] = {"work": row["work"], "context": context, "ms": ms}
    shown |= {"native %": row["native %"], "tokens/s": 1e3 * rows / ms}
    if not context:
        left_out = dict.fromkeys(("weights MB", "states MB", "baseline: read ms", "share %", "packed %"), "")
        return shown | left_out | {"others": row["others"]}
    spec, per_s = given.spec, machine.read_bytes_per_s
    assert spec.state is not None, "that is what these models are"
    weights = weights_read(given, headers, rows)
    states = float(spec.state.num_bytes * rows)
    attending = spec.num_layers - len(spec.state.layers)
    cached = 2 * 2 * attending * spec.num_kv_heads * spec.head_dim * context * rows
    read_ms, packed_ms = (
        1e3 * (weights * per_weight + states + cached) / per_s
        for per_weight in (2.0, machine.read_bytes_per_bfloat16)
    )
    return shown | {
        "weights MB": 2 * weights / 1e6,
        "states MB": states / 1e6,
        "baseline: read ms": read_ms,
        "share %": 100 * read_ms / ms,
        "packed %": 100 * packed_ms / ms,
        "others": row["others"],
    }


def _op_rows(work: str, run: Callable[[], object], count: Callable[[int], bool]) -> list[Row]:
    """Milliseconds of each op, over all forwards of `run` whose number of tokens counts; per forward where
    they decode.
    """
    times = OpTimes()
    with times.counted():
        run()
    found = [each for num_tokens, each in times.forwards if count(num_tokens)]
    names = {name for each in found for name in each}
    shares = {name: sum(each.get(name, 0.0) for each in found) for name in names}
    if work.startswith("step"):
        shares = {name: median(each.get(name, 0.0) for each in found) for name in names}
    total = sum(shares.values())
    return [
        {"work": work, "op": name, "ms": round(ms, 3), "share %": round(100 * ms / total, 1)}
        for name, ms in sorted(shares.items(), key=lambda each: -each[1])
        if ms >= _LEAST_MS
    ]


def _prefix_rows(bench: Bench, asked: argparse.Namespace) -> list[Row]:
    """First tokens of prompts that begin alike, of one engine; medians over prefixes."""
    drawn, engine = random.Random(0), bench.engine(bench.config)
    names = (
        f"baseline: {asked.prefix} + {asked.tail} tokens that nobody sent",
        "the second that begins so",
        *["those after it"] * _NUM_FOLLOWERS,
    )
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in names}

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(bench.facts.vocab_size) for _ in range(count))

    for _ in range(asked.rounds):
        prefix = tokens(asked.prefix)
        for name in names:
            found[name].append(bench.first_token_s(engine, prefix + tokens(asked.tail)))
    seconds = {name: median(took for took, _ in each) for name, each in found.items()}
    return [
        {
            "prompt": name,
            "first token ms": 1e3 * seconds[name],
            "of the baseline %": 100 * seconds[name] / seconds[names[0]],
            "cached tokens": median(cached for _, cached in each),
        }
        for name, each in found.items()
    ]


def _asked() -> argparse.Namespace:
    parser = options(__doc__)
    names = sorted(SHAPES, reverse=True)
    parser.add_argument("--checkpoint", nargs="+", choices=names, default=names)
    parser.add_argument("--ours", choices=sorted(OURS), default="bf16")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 2048])
    parser.add_argument("--context", type=int, default=64, help="tokens of a sequence before its first step")
    parser.add_argument("--prefix", type=int, default=2000, help="tokens that prompts share; 0 leaves it out")
    parser.add_argument("--tail", type=int, default=40, help="tokens that they do not share")
    parser.add_argument("--rounds", type=int, default=3, help="prefixes")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    return parser.parse_args()


def _measure(name: str, asked: argparse.Namespace, tell: Callable[..., None]) -> None:
    folder = make_checkpoint(name, asked.environments.resolve(), SHAPES)
    bench = Bench(folder, asked.ours)
    given = plan_input(EngineConfig(), ModelConfig(path=str(folder)), device="cpu", available_bytes=1 << 34)
    headers = read_headers(folder)
    gc.collect()
    gc.freeze()
    bench.run(1, 16, 4)
    steps: list[Row] = []
    ops: list[Row] = []
    before = measure_machine(rows=_RATE_ROWS)
    works = [partial(prompt_row, bench, count) for count in asked.prompts]
    works += [partial(step_row, bench, count, asked.context) for count in asked.rows]
    for work in works:
        found = work()
        after = measure_machine(rows=_RATE_ROWS)
        steps.append(_beside(found, before.best(after), given, headers))
        tell(name, steps[-1])
        before = after
    for count in asked.prompts:
        whole = partial(bench.run, 1, count, 1)
        ops += _op_rows(f"prompt of {count}", whole, partial(int.__lt__, 1))
    for count in asked.rows:
        decode = partial(bench.run, count, asked.context, 12)
        ops += _op_rows(f"step of {count}", decode, partial(int.__eq__, count))
    prefixes = _prefix_rows(bench, asked) if asked.prefix else []
    notes = f"{name}, {asked.ours}, level {bench.level}, {os.cpu_count()} CPUs"
    tables = {
        "": ("Models with states: steps and prompts", steps),
        "_ops": ("Where prompts and steps go", ops),
        "_prefix": (f"First tokens behind a prefix of {asked.prefix} tokens", prefixes),
    }
    for ending, (title, table) in tables.items():
        path = asked.json and asked.json.with_stem(f"{asked.json.stem}_{name}{ending}")
        if table:
            publish(title, table, path, notes)
    bench.runner.close()


def main() -> None:
    """The tables of each checkpoint."""
    asked = _asked()
    asked.environments.resolve().mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def tell(*said: object) -> None:
        print(f"{time.perf_counter() - began:4.0f} s", *said, flush=True)

    hold_this_process()
    for name in asked.checkpoint:
        tell("making, loading and measuring", name)
        _measure(name, asked, tell)


if __name__ == "__main__":
    main()
