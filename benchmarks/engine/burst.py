"""Prompts that arrive at once, or one a second, while answers are being given, on a slow machine.

Baselines, same scheduler: a step is limited in tokens only; it is limited in time, coarsely (250 ms, and no
fewer than 64 prompt tokens or eight for each sequence that decodes). Ours is cut finer, see
engine/policy/pace.py.
Device simulated under a virtual clock, see virtual.py: two cores, 450 tokens/s of a 0.6-billion-parameter
model, whose weights are read in 40 ms.

    python -m benchmarks.engine.burst [--json OUT]
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.engine.virtual import Arrival, Device, percentile, simulate
from engine.config import SchedulerConfig
from engine.policy import pace
from engine.types import SchedulerOutput

_WEIGHTS_S = 0.04


@dataclass(frozen=True)
class Cores(Device):
    """Few rows cost the reading of the weights, many what they compute; a row reads its history."""

    token_s: float = 1 / 450
    # 112 KiB at 30 GB/s.
    context_token_s: float = 3.8e-6

    def seconds(self, plan: SchedulerOutput) -> float:
        """Duration of a step."""
        context = sum(row.start for row in plan.scheduled)
        return max(_WEIGHTS_S, self.token_s * plan.num_tokens) + self.context_token_s * context


def workloads() -> dict[str, list[Arrival]]:
    """Prompts of 256 tokens and answers of 128 ("burst"); in the first, beside eight answers under way."""
    answers = [Arrival(0.0, 64, 400, "answer", "answers") for _ in range(8)]
    return {
        "32 beside 8 answers": answers + [Arrival(5.0, 256, 128, "burst", "burst") for _ in range(32)],
        "8 at once": [Arrival(0.0, 256, 128, "burst", "burst") for _ in range(8)],
        "32 at once": [Arrival(0.0, 256, 128, "burst", "burst") for _ in range(32)],
        "24, one a second": [Arrival(float(at), 256, 128, "burst", "burst") for at in range(24)],
    }


def main() -> None:
    """Runs the sides."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    default = SchedulerConfig().step_target_ms
    for load, arrivals in workloads().items():
        for name, target_ms, least, per_decode in (
            ("baseline: 1,024 tokens", 0.0, 0, 0),
            ("baseline: 250 ms, 64, 8 a decode", 250.0, 64, 8),
            (f"ours: {default:.0f} ms", default, pace.LEAST_CHUNK_TOKENS, pace.LEAST_CHUNK_PER_DECODE),
        ):
            coarse = patch.multiple(pace, LEAST_CHUNK_TOKENS=least, LEAST_CHUNK_PER_DECODE=per_decode)
            with coarse:
                outcome = simulate(list(arrivals), SchedulerConfig(step_target_ms=target_ms), Cores())
            served = outcome.of("answer") + outcome.of("burst")
            gaps = [gap for each in served for gap in each.gaps_s]
            first = [each.ttft_s or 0.0 for each in outcome.of("burst")]
            rows.append(
                {
                    "load": load,
                    "steps": name,
                    "ITL p99 ms": percentile(gaps, 0.99) * 1000,
                    "longest gap ms": max(gaps) * 1000,
                    "TTFT p50 s": percentile(first, 0.5),
                    "TTFT p99 s": percentile(first, 0.99),
                    "whole run s": outcome.duration_s,
                }
            )
    publish("Prompts beside answers (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
