"""Three tiers at three times the capacity: each tier's TTFT against its target, and who is refused.

The baseline has one queue without tiers and refuses nothing. Simulated device, see virtual.py.

    python -m benchmarks.engine.tiers [--json OUT]
"""

from __future__ import annotations

import dataclasses
import random

from benchmarks.engine.report import arguments, publish
from benchmarks.engine.virtual import Arrival, Device, Outcome, percentile, poisson, simulate
from engine.config import SchedulerConfig
from engine.types import FinishReason

_SECONDS = 60.0
# Tier: priority, TTFT target and queue limit in seconds, requests per second.
_TIERS = {"gold": (30, 0.5, 2.0, 8.0), "silver": (20, 2.0, 8.0, 16.0), "bronze": (10, 10.0, 20.0, 36.0)}


def workload() -> list[Arrival]:
    """About 20 requests per second can be served."""
    rng = random.Random(3)
    return [
        Arrival(at, 512, 128, tier, f"{tier}-{index % 3}", priority, target, limit)
        for tier, (priority, target, limit, rate) in _TIERS.items()
        for index, at in enumerate(poisson(rng, rate, _SECONDS))
    ]


def figures(name: str, outcome: Outcome) -> list[dict[str, str | float]]:
    """One row per tier."""
    rows: list[dict[str, str | float]] = []
    for tier, (_, target, limit, _) in _TIERS.items():
        served = outcome.of(tier)
        accepted = [each for each in served if each.accepted]
        first = [each.ttft_s for each in accepted if each.ttft_s is not None]
        waits = [each.queue_s for each in accepted if each.queue_s is not None]
        finished = [each for each in accepted if each.finish is FinishReason.LENGTH]
        rows.append(
            {
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
        )
    return rows


def main() -> None:
    """Runs both sides."""
    options = arguments(__doc__ or "")
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=32, max_waiting=100_000, aging_s=30.0)
    flat = [
        dataclasses.replace(arrival, priority=0, tenant="all", ttft_target_s=None, queue_limit_s=None)
        for arrival in workload()
    ]
    rows = [
        *figures("baseline: one queue", simulate(flat, config, Device())),
        *figures("ours: tiers, early refusal", simulate(workload(), config, Device())),
    ]
    publish("Three tiers at three times the capacity (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
