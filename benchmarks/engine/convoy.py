"""One 8,192-token prompt every second among 64-token chats: time between tokens of the chats.

Baselines, same scheduler: prompts computed whole (no chunks), and chunks without a cap on the share of long
prompts. Simulated device, see virtual.py.

    python -m benchmarks.engine.convoy [--json OUT]
"""

from __future__ import annotations

import random

from benchmarks.engine.report import arguments, publish
from benchmarks.engine.virtual import Arrival, Device, percentile, poisson, simulate
from engine.config import SchedulerConfig

_SECONDS = 60.0
# About a 14-billion-parameter model: a whole 8,192-token prompt takes a quarter of a second.
_DEVICE = Device(step_s=0.015, token_s=0.00003)


def workload() -> list[Arrival]:
    """Chats at 20 per second, long prompts at one per second."""
    rng = random.Random(1)
    chats = [Arrival(at, 64, 128, "chat", "chats") for at in poisson(rng, 20, _SECONDS)]
    long = [Arrival(at + 0.5, 8192, 16, "long", "long") for at in range(int(_SECONDS))]
    return chats + long


def main() -> None:
    """Runs the three configurations."""
    options = arguments(__doc__ or "")
    sides = {
        "baseline: whole prompts": SchedulerConfig(
            max_num_batched_tokens=16_384, max_num_seqs=256, long_prefill_share=1.0
        ),
        "baseline: chunks of 2048, no cap": SchedulerConfig(
            max_num_batched_tokens=2048, max_num_seqs=256, long_prefill_share=1.0
        ),
        "ours: chunks of 1024, long prompts half": SchedulerConfig(
            max_num_batched_tokens=1024, max_num_seqs=256, long_prefill_share=0.5
        ),
    }
    rows = []
    for name, config in sides.items():
        outcome = simulate(workload(), config, _DEVICE)
        chats, long = outcome.of("chat"), outcome.of("long")
        gaps = [gap for each in chats for gap in each.gaps_s]
        rows.append(
            {
                "configuration": name,
                "chat ITL p50 ms": percentile(gaps, 0.5) * 1000,
                "chat ITL p99 ms": percentile(gaps, 0.99) * 1000,
                "chat's longest gap p50 ms": percentile([max(each.gaps_s) for each in chats], 0.5) * 1000,
                "max ms": max(gaps) * 1000,
                "chat TTFT p99 ms": percentile([each.ttft_s or 0 for each in chats], 0.99) * 1000,
                "long TTFT p50 ms": percentile([each.ttft_s or 0 for each in long], 0.5) * 1000,
            }
        )
    publish("Long prompts among chats (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
