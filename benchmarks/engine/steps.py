"""How long steps are, and whom that hurts: the real scheduler on a device with measured rates.

The device is a 0.6-billion-parameter model in bfloat16 on a processor with AMX: 122 ms for a step of 32
answers, 132 tokens a second for eight, 822 tokens a second of prompts in chunks of 512 and half of that in
chunks of 64. Streams of 256 tokens in and 128 out start together and ask a second time when they are answered.

The baselines are one number for every step, whoever is answered in it: 75 ms, and the whole token budget. Ours
runs without targets, and with a tier's target for the time per token. The second table has two tiers at once:
interactive chats, and a queue of long prompts of a tier without a target.

    python -m benchmarks.engine.steps [--json OUT]
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.engine.virtual import Arrival, Device, Outcome, Served, poisson, simulate
from engine.config import SchedulerConfig
from engine.types import MeasuredSpeed, SchedulerOutput

_SECONDS = 60.0
_STREAMS = (1, 8, 32, 64)
# Rows that decode, and milliseconds of their step.
_DECODES_MS = ((1, 42.7), (8, 60.6), (32, 122.0), (64, 204.0))
# Tokens of a chunk, and tokens a second.
_CHUNKS_PER_S = ((1, 10.0), (16, 137.0), (64, 411.0), (128, 575.0), (256, 715.0), (512, 822.0), (4096, 822.0))
# As the engine would have measured it at its start.
_SPEED = MeasuredSpeed(
    prompt_tokens_per_s=822.0,
    prompt_tokens=512,
    short_prompt_tokens_per_s=228.0,
    short_prompt_tokens=32,
    tokens_per_s_alone=1000 / 42.7,
    tokens_per_s_together=132.0,
    num_together=8,
)
# Name, milliseconds of the step limit, and of the tier's target for the time per token.
_RULES = (
    ("baseline: steps of 75 ms", 75.0, None),
    ("baseline: whole budget", 0.0, None),
    ("ours: no target", SchedulerConfig().step_target_ms, None),
    ("ours: target of 400 ms", SchedulerConfig().step_target_ms, 400.0),
    ("ours: target of 200 ms", SchedulerConfig().step_target_ms, 200.0),
)


def _between(points: tuple[tuple[int, float], ...], at: int) -> float:
    """The line through the points, and on beyond the last two."""
    index = min(max(bisect_right(points, (at, math.inf)), 1), len(points) - 1)
    (left, low), (right, high) = points[index - 1], points[index]
    return low + (high - low) * (at - left) / (right - left)


@dataclass(frozen=True)
class MeasuredDevice(Device):
    """Seconds of a step as they were measured: of its answers, and of what prompts add."""

    def seconds(self, plan: SchedulerOutput) -> float:
        """Duration of a step. No chunk has one token here, so a row that has is an answer."""
        sizes = [row.num_tokens for row in plan.scheduled]
        decodes, chunk = sizes.count(1), sum(size for size in sizes if size > 1)
        decode_s = _between(_DECODES_MS, decodes) / 1000 if decodes else 0.0
        return decode_s + (chunk / _between(_CHUNKS_PER_S, chunk) if chunk else 0.0)


def _config(limit_ms: float) -> SchedulerConfig:
    return SchedulerConfig(max_num_seqs=64, step_target_ms=limit_ms)


def _in_turns(first: list[Arrival], limit_ms: float) -> Outcome:
    """Each stream asks once more when it is answered."""
    again = {id(each): replace(each) for each in first}

    def follows(one: Served) -> Iterable[Arrival]:
        arrival = again.pop(id(one.arrival), None)
        return () if arrival is None else (replace(arrival, at_s=one.ended_s),)

    return simulate(first, _config(limit_ms), MeasuredDevice(), speed=_SPEED, follows=follows)


def _latencies(served: list[Served], target_ms: float | None) -> Row:
    firsts = [each.ttft_s for each in served if each.ttft_s is not None]
    gaps = [gap * 1000 for each in served for gap in each.gaps_s]
    means = [each.tpot_s * 1000 for each in served if each.tpot_s is not None]
    kept = [mean <= target_ms for mean in means] if target_ms else []
    return {
        "TTFT mean s": sum(firsts) / len(firsts),
        "TTFT p99 s": percentile(firsts, 0.99),
        "gap p50 ms": percentile(gaps, 0.5),
        "gap p99 ms": percentile(gaps, 0.99),
        "longest gap ms": max(gaps),
        "TPOT p99 ms": percentile(means, 0.99),
        "pace kept %": 100 * sum(kept) / len(kept) if kept else "",
    }


def streams() -> list[Row]:
    """So many streams at once, by each rule."""
    rows: list[Row] = []
    for num_streams in _STREAMS:
        for name, limit_ms, target_ms in _RULES:
            target_s = None if target_ms is None else target_ms / 1000
            first = [
                Arrival(0.0, 256, 128, "standard", "all", tpot_target_s=target_s) for _ in range(num_streams)
            ]
            outcome = _in_turns(first, limit_ms)
            num_tokens = sum(len(each.token_times_s) for each in outcome.served)
            rows.append(
                {
                    "streams": num_streams,
                    "rule": name,
                    "tokens/s": num_tokens / outcome.duration_s,
                    **_latencies(outcome.served, target_ms),
                }
            )
    return rows


def main() -> None:
    """Both tables; with --json the second has a file of its own beside it."""
    path = options(__doc__).parse_args().json
    for ending, title, found in (
        ("", "Streams of 256 + 128 tokens", streams()),
        ("_tiers", "Chats beside long prompts", tiers()),
    ):
        publish(f"{title} (simulated device)", found, path and path.with_stem(path.stem + ending))


if __name__ == "__main__":
    main()
