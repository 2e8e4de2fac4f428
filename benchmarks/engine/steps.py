"""How long steps are, and whom that hurts: the real scheduler on a device with measured rates.

The device is a 0.6-billion-parameter model in bfloat16 on a processor with AMX: 122 ms for a step of 32
answers, 132 tokens a second for eight, 822 tokens a second of prompts in chunks of 512 and half of that in
chunks of 64. Streams of 256 tokens in and 128 out start together, and ask once more when they are answered.

The baselines have one number for every step, whoever is answered in it: 75 ms, and the whole token budget.
Ours runs without targets, and with a tier's target for the time per token. In the second table interactive
chats come beside eight streams of 4,096-token prompts of a tier without targets.

    python -m benchmarks.engine.steps [--json OUT]
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.engine.virtual import Arrival, Device, Outcome, Served, poisson, simulate
from engine.config import SchedulerConfig
from engine.policy.pace import Answers, PromptsLeft, StepLimits, chunk_work
from engine.policy.rates import least_chunk
from engine.policy.step_time import StepTime
from engine.types import MeasuredSpeed, SchedulerOutput

_SECONDS = 60.0
_STREAMS = (1, 8, 32, 64)
# Time per token that the chats' tier promises.
_CHAT_TARGET_MS = 150.0
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
_LIMIT_MS = SchedulerConfig().step_target_ms


class _Rule(NamedTuple):
    """How steps are cut: by one number, or by who is answered in them."""

    name: str
    limit_ms: float = _LIMIT_MS
    # Of the tier, for the time per token; two seconds for the first one then.
    tpot_s: float | None = None
    one_number: bool = False


_ONE_NUMBER = (
    _Rule("baseline: steps of 75 ms", 75.0, one_number=True),
    _Rule("baseline: whole budget", 0.0, one_number=True),
)
_OURS = (
    _Rule("ours: no target"),
    _Rule("ours: targets of 2 s, 400 ms", tpot_s=0.4),
    _Rule("ours: targets of 2 s, 200 ms", tpot_s=0.2),
)


def _by_one_number(time: StepTime, answers: Answers, prompts: PromptsLeft, limits: StepLimits) -> float:
    """The baselines' rule: no more than the limit, or twice what the answers take, whatever that costs."""
    limit_s = limits.longest_s
    if not limit_s:
        return math.inf
    decode_s = time.decode_s(answers.work)
    room = time.chunk_within(max(limit_s, 2 * decode_s) - decode_s)
    return max(least_chunk(answers.num_rows), room)


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


def _run(arrivals: list[Arrival], rule: _Rule, *, turns: int = 1) -> Outcome:
    """The workload by one rule; who is answered asks again until it has had so many turns."""
    left = {id(each): turns - 1 for each in arrivals}

    def follows(one: Served) -> Iterable[Arrival]:
        num_left = left.pop(id(one.arrival), 0)
        if not num_left:
            return ()
        following = replace(one.arrival, at_s=one.ended_s)
        left[id(following)] = num_left - 1
        return (following,)

    config = SchedulerConfig(max_num_seqs=64, step_target_ms=rule.limit_ms)
    decides = _by_one_number if rule.one_number else chunk_work
    with patch("engine.scheduler.step_room.chunk_work", decides):
        return simulate(arrivals, config, MeasuredDevice(), speed=_SPEED, follows=follows)


def _latencies(served: list[Served], *targets_ms: float) -> Row:
    firsts = [each.ttft_s for each in served if each.ttft_s is not None]
    gaps = [gap * 1000 for each in served for gap in each.gaps_s]
    means = [each.tpot_s * 1000 for each in served if each.tpot_s is not None]
    kept = {target: sum(mean <= target for mean in means) / len(means) for target in targets_ms}
    return {
        "TTFT mean s": sum(firsts) / len(firsts),
        "gap p50 ms": percentile(gaps, 0.5),
        "gap p99 ms": percentile(gaps, 0.99),
        "TPOT p99 ms": percentile(means, 0.99),
        **{f"TPOT within {target:g} ms %": 100 * share for target, share in kept.items()},
    }


def streams() -> list[Row]:
    """So many streams at once, by each rule."""
    rows: list[Row] = []
    for num_streams in _STREAMS:
        for rule in (*_ONE_NUMBER, *_OURS):
            ttft_s = None if rule.tpot_s is None else 2.0
            first = [
                Arrival(0.0, 256, 128, "", "all", ttft_target_s=ttft_s, tpot_target_s=rule.tpot_s)
                for _ in range(num_streams)
            ]
            outcome = _run(first, rule, turns=2)
            num_tokens = sum(len(each.token_times_s) for each in outcome.served)
            rows.append(
                {
                    "streams": num_streams,
                    "rule": rule.name,
                    "tokens/s": num_tokens / outcome.duration_s,
                    **_latencies(outcome.served, 400.0, 200.0),
                }
            )
    return rows


def tiers() -> list[Row]:
    """Chats come at one every two seconds, for a minute."""
    rng = random.Random(4)
    chats = [
        Arrival(at, 64, 96, "chat", "chats", 20, ttft_target_s=1.0, tpot_target_s=_CHAT_TARGET_MS / 1000)
        for at in poisson(rng, 0.5, _SECONDS)
    ]
    documents = [Arrival(0.0, 4096, 64, "documents", "documents") for _ in range(8)]
    rows: list[Row] = []
    for rule in (*_ONE_NUMBER, _Rule("ours: by who is answered")):
        outcome = _run([*chats, *documents], rule)
        num_tokens = sum(
            each.arrival.num_prompt_tokens + each.arrival.max_tokens for each in outcome.of("documents")
        )
        ended_s = max(each.ended_s for each in outcome.of("documents"))
        rows.append(
            {
                "rule": rule.name,
                **{f"chats' {name}": value for name, value in _chats(outcome).items()},
                "documents' tokens/s, prompts too": num_tokens / ended_s,
            }
        )
    return rows


def _chats(outcome: Outcome) -> Row:
    served = outcome.of("chat")
    firsts = [each.ttft_s for each in served if each.ttft_s is not None]
    return {**_latencies(served, _CHAT_TARGET_MS), "TTFT p99 s": percentile(firsts, 0.99)}


def main() -> None:
    """Both tables; with --json the second has a file of its own beside it."""
    path = options(__doc__).parse_args().json
    for ending, title, found in (
        ("", "Streams of 256 + 128 tokens, by what cuts a step", streams()),
        ("_tiers", "Chats beside long prompts", tiers()),
    ):
        publish(f"{title} (simulated device)", found, path and path.with_stem(path.stem + ending))


if __name__ == "__main__":
    main()
