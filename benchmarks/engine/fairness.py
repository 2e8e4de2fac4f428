"""Two tenants of one tier, one flooding with ten times the requests: who gets how much, and how late.

The baseline sees no tenants and serves in order of arrival. Simulated device, see virtual.py.

    python -m benchmarks.engine.fairness [--json OUT]
"""

from __future__ import annotations

import dataclasses
import random

from benchmarks.engine.report import arguments, publish
from benchmarks.engine.virtual import Arrival, Device, Outcome, percentile, poisson, simulate
from engine.config import SchedulerConfig

_SECONDS = 60.0


def workload() -> list[Arrival]:
    """The flood alone is twice what 32 places can serve; the quiet tenant asks for a fifth of it."""
    rng = random.Random(2)
    flood = [Arrival(at, 512, 128, "flood", "flood") for at in poisson(rng, 40, _SECONDS)]
    quiet = [Arrival(at, 256, 128, "quiet", "quiet") for at in poisson(rng, 4, _SECONDS)]
    return flood + quiet


def figures(name: str, outcome: Outcome) -> dict[str, str | float]:
    """One row."""
    tokens = {
        kind: sum(sum(at <= _SECONDS for at in each.token_times_s) for each in outcome.of(kind))
        for kind in ("flood", "quiet")
    }
    asked = sum(each.arrival.max_tokens for each in outcome.of("quiet"))
    first = [each.ttft_s for each in outcome.of("quiet") if each.ttft_s is not None]
    return {
        "configuration": name,
        "quiet TTFT p50 s": percentile(first, 0.5),
        "quiet TTFT p99 s": percentile(first, 0.99),
        "quiet served of asked %": 100 * tokens["quiet"] / asked,
        "served tokens flood : quiet": tokens["flood"] / max(1, tokens["quiet"]),
    }


def main() -> None:
    """Runs both sides; only the tenants' names differ."""
    options = arguments(__doc__ or "")
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=32, max_waiting=100_000, aging_s=1e9)
    nameless = [dataclasses.replace(arrival, tenant="all") for arrival in workload()]
    stop_s = 2 * _SECONDS
    rows = [
        figures("baseline: order of arrival", simulate(nameless, config, Device(), stop_s=stop_s)),
        figures("ours: virtual token counters", simulate(workload(), config, Device(), stop_s=stop_s)),
    ]
    publish("A flooding and a quiet tenant (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
