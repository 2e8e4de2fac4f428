"""Who gets how much, and how late, under more than can be served: the real scheduler on a simulated device.

Three tables, each with its baseline in the same run (see virtual.py). Two tenants of one tier, one flooding
with ten times the requests: the baseline sees no tenants and serves in order of arrival. Three tiers at three
times the capacity: the baseline has one queue without tiers and refuses nothing. One 8,192-token prompt every
second among 64-token chats: the baselines compute prompts whole, and in chunks without a cap on the share of
long ones.

    python -m benchmarks.engine.fairness [--json OUT]
"""

from __future__ import annotations

import dataclasses
import random

import msgspec

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.engine.virtual import Arrival, Device, Outcome, Served, poisson, simulate
from engine.config import SchedulerConfig
from engine.types import FinishReason

_SECONDS = 60.0
_CONFIG = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=32, max_waiting=100_000)
# Tier: priority, TTFT target and queue limit in seconds, requests per second.
_TIERS = {"gold": (30, 0.5, 2.0, 8.0), "silver": (20, 2.0, 8.0, 16.0), "bronze": (10, 10.0, 20.0, 36.0)}
# About a 14-billion-parameter model: a whole 8,192-token prompt takes a quarter of a second.
_LARGE_MODEL = Device(step_s=0.015, token_s=0.00003)
# Tokens of a step, the share of them that long prompts may take, and the step's time beside answers (0: any).
_CHUNKS = {
    "baseline: whole prompts": (16_384, 1.0, 0.0),
    "baseline: chunks of 2048, no cap": (2048, 1.0, 0.0),
    "ours: chunks of 1024, long prompts half": (1024, 0.5, 75.0),
}


def _firsts_s(served: list[Served]) -> list[float]:
    return [each.ttft_s for each in served if each.ttft_s is not None]


def flood() -> list[Row]:
    """The flood alone is twice what 32 places can serve; the quiet tenant asks for a fifth of it."""
    rng = random.Random(2)
    arrivals = [Arrival(at, 512, 128, "flood", "flood") for at in poisson(rng, 40, _SECONDS)]
    arrivals += [Arrival(at, 256, 128, "quiet", "quiet") for at in poisson(rng, 4, _SECONDS)]
    nameless = [dataclasses.replace(arrival, tenant="all") for arrival in arrivals]
    config = msgspec.structs.replace(_CONFIG, aging_s=1e9)
    rows: list[Row] = []
    for name, asked in (("baseline: order of arrival", nameless), ("ours: virtual token counters", arrivals)):
        outcome = simulate(asked, config, Device(), stop_s=2 * _SECONDS)
        tokens = {
            kind: sum(sum(at <= _SECONDS for at in each.token_times_s) for each in outcome.of(kind))
            for kind in ("flood", "quiet")
        }
        first = _firsts_s(outcome.of("quiet"))
        wanted = sum(each.arrival.max_tokens for each in outcome.of("quiet"))
        rows.append(
            {
                "configuration": name,
                "quiet TTFT p50 s": percentile(first, 0.5),
                "quiet TTFT p99 s": percentile(first, 0.99),
                "quiet served of asked %": 100 * tokens["quiet"] / wanted,
                "served tokens flood : quiet": tokens["flood"] / max(1, tokens["quiet"]),
            }
        )
    return rows


def tiers() -> list[Row]:
    """About 20 requests per second can be served."""
    rng = random.Random(3)
    arrivals = [
        Arrival(at, 512, 128, tier, f"{tier}-{index % 3}", priority, target, limit)
        for tier, (priority, target, limit, rate) in _TIERS.items()
        for index, at in enumerate(poisson(rng, rate, _SECONDS))
    ]
    flat = [
        dataclasses.replace(arrival, priority=0, tenant="all", ttft_target_s=None, queue_limit_s=None)
        for arrival in arrivals
    ]
    config = msgspec.structs.replace(_CONFIG, aging_s=30.0)
    return [
        _of_tier(name, tier, outcome)
        for name, asked in (("baseline: one queue", flat), ("ours: tiers, early refusal", arrivals))
        for outcome in (simulate(asked, config, Device()),)
        for tier in _TIERS
    ]


def _of_tier(name: str, tier: str, outcome: Outcome) -> Row:
    _, target, limit, _ = _TIERS[tier]
    served = outcome.of(tier)
    accepted = [each for each in served if each.accepted]
    first = _firsts_s(accepted)
    waits = [each.queue_s for each in accepted if each.queue_s is not None]
    finished = [each for each in accepted if each.finish is FinishReason.LENGTH]
    return {
        "configuration": name,
        "tier": tier,
        "target s": target,
        "TTFT p50 s": percentile(first, 0.5),
        "TTFT p99 s": percentile(first, 0.99),
        "within target %": 100 * sum(each <= target for each in first) / max(1, len(first)),
        "queue limit s": limit,
        "longest wait s": max(waits, default=0.0),
        "started late": sum(each > limit for each in waits),
        "asked": len(served),
        "refused at once": len(served) - len(accepted),
        "accepted, then dropped": len(accepted) - len(finished),
        "finished": len(finished),
    }


def convoy() -> list[Row]:
    """Chats at 20 per second, long prompts at one per second."""
    rng = random.Random(1)
    arrivals = [Arrival(at, 64, 128, "chat", "chats") for at in poisson(rng, 20, _SECONDS)]
    arrivals += [Arrival(at + 0.5, 8192, 16, "long", "long") for at in range(int(_SECONDS))]
    rows: list[Row] = []
    for name, (num_tokens, share, target_ms) in _CHUNKS.items():
        config = SchedulerConfig(
            max_num_batched_tokens=num_tokens,
            max_num_seqs=256,
            long_prefill_share=share,
            step_target_ms=target_ms,
        )
        outcome = simulate(arrivals, config, _LARGE_MODEL)
        chats = outcome.of("chat")
        gaps = [gap for each in chats for gap in each.gaps_s]
        rows.append(
            {
                "configuration": name,
                "chat ITL p50 ms": percentile(gaps, 0.5) * 1000,
                "chat ITL p99 ms": percentile(gaps, 0.99) * 1000,
                "chat's longest gap p50 ms": percentile([max(each.gaps_s) for each in chats], 0.5) * 1000,
                "max ms": max(gaps) * 1000,
                "chat TTFT p99 ms": percentile(_firsts_s(chats), 0.99) * 1000,
                "long TTFT p50 ms": percentile(_firsts_s(outcome.of("long")), 0.5) * 1000,
            }
        )
    return rows


def main() -> None:
    """The three tables; with --json the second and third have files of their own beside it."""
    path = options(__doc__).parse_args().json
    for ending, title, found in (
        ("", "A flooding and a quiet tenant", flood()),
        ("_tiers", "Three tiers at three times the capacity", tiers()),
        ("_convoy", "Long prompts among chats", convoy()),
    ):
        publish(f"{title} (simulated device)", found, path and path.with_stem(path.stem + ending))


if __name__ == "__main__":
    main()
