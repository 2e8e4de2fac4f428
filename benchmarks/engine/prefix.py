"""Chats that share a 1,024-token system prompt: time to the first token with the prefix cache and without.

Simulated device, see virtual.py.

    python -m benchmarks.engine.prefix [--json OUT]
"""

from __future__ import annotations

import random

from benchmarks.engine.report import arguments, publish
from benchmarks.engine.virtual import Arrival, Device, percentile, poisson, simulate
from engine.config import SchedulerConfig

_SECONDS = 60.0


def workload() -> list[Arrival]:
    """Fifteen chats per second, 1,024 shared tokens and 64 of their own."""
    rng = random.Random(4)
    times = poisson(rng, 15, _SECONDS)
    return [Arrival(at, 1088, 128, "chat", "chats", num_shared_tokens=1024) for at in times]


def main() -> None:
    """Runs both sides."""
    options = arguments(__doc__ or "")
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=128, long_prefill_tokens=2048)
    rows = []
    for name, caching in (("baseline: no prefix cache", False), ("ours: prefix cache", True)):
        outcome = simulate(workload(), config, Device(), prefix_caching=caching)
        first = [each.ttft_s or 0.0 for each in outcome.served]
        slots = sum(each for each, _ in outcome.kv_use)
        gaps = [gap for each in outcome.served for gap in each.gaps_s]
        rows.append(
            {
                "configuration": name,
                "TTFT p50 ms": percentile(first, 0.5) * 1000,
                "TTFT p99 ms": percentile(first, 0.99) * 1000,
                "ITL p99 ms": percentile(gaps, 0.99) * 1000,
                "KV waste %": 100 * (1 - sum(each for _, each in outcome.kv_use) / slots),
            }
        )
    publish("A shared prefix of 1,024 tokens (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
