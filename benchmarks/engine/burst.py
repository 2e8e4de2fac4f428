"""32 prompts of 256 tokens arrive at once while eight answers are being given, on a slow machine.

Baseline, same scheduler: a step is limited in tokens only. Ours is limited in time as well, as measured,
but to no fewer than eight prompt tokens for each sequence that decodes.
Device simulated under a virtual clock, see virtual.py: two cores, 450 tokens/s of a 0.6-billion-parameter
model, whose weights are read in 40 ms.

    python -m benchmarks.engine.burst [--json OUT]
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.engine.virtual import Arrival, Device, percentile, simulate
from engine.config import SchedulerConfig
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


def workload() -> list[Arrival]:
    """Eight answers from the start on, and the burst after five seconds."""
    answers = [Arrival(0.0, 64, 400, "answer", "answers") for _ in range(8)]
    return answers + [Arrival(5.0, 256, 128, "burst", "burst") for _ in range(32)]


def main() -> None:
    """Runs the sides."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    for name, target_ms in (
        ("baseline: 1,024 tokens", 0.0),
        ("1 s", 1000.0),
        ("ours: 250 ms", 250.0),
    ):
        outcome = simulate(workload(), SchedulerConfig(step_target_ms=target_ms), Cores())
        gaps = [gap for each in outcome.of("answer") for gap in each.gaps_s]
        first = [each.ttft_s or 0.0 for each in outcome.of("burst")]
        slots = sum(each for each, _ in outcome.kv_use)
        rows.append(
            {
                "configuration": name,
                "answers' longest gap ms": max(gaps) * 1000,
                "burst TTFT p50 s": percentile(first, 0.5),
                "burst TTFT p99 s": percentile(first, 0.99),
                "whole run s": outcome.duration_s,
                "KV waste %": 100 * (1 - sum(each for _, each in outcome.kv_use) / slots),
            }
        )
    publish("32 prompts at once beside eight answers (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
