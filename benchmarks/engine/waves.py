"""Requests that come in one wave, or follow one another, on two slow cores: what the shape of the load costs.

A closed loop: so many clients, each of which sends its next request when it has its answer. With one request
for each client nobody takes the places that come free, so many steps at the end read all weights for a
few sequences; with more, prompts of the next are computed beside the answers of the others.
Baseline: prompts are computed as fast as the token budget allows, whoever waits meanwhile. Device simulated
under a virtual clock, with the times of steps as measured on two cores of a Xeon (see `Cores`).

    python -m benchmarks.engine.waves [--json OUT]
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.engine.virtual import Arrival, Device, new_request, percentile, plan_result
from engine.config import CacheConfig, SchedulerConfig
from engine.scheduler import Scheduler
from engine.types import SchedulerOutput

_PROMPT, _ANSWER = 256, 128
# Seconds until a client has sent its next request, and between clients at the start.
_TURN_S, _STAGGER_S = 0.005, 0.003


@dataclass(frozen=True)
class Cores(Device):
    """A 0.6-billion-parameter model in bfloat16: layers are read in 38 ms and the head in 11, a row is
    multiplied in 2.95 ms, reading and multiplying overlap in part; attention takes its own.
    """

    layers_s: float = 0.038
    row_s: float = 0.00295
    head_s: float = 0.011
    prompt_attention_s: float = 0.0003
    decode_attention_s: float = 0.0009

    def seconds(self, plan: SchedulerOutput) -> float:
        """Duration of a step."""
        num_prompt = sum(row.num_tokens for row in plan.scheduled if row.num_tokens > 1)
        num_decode = plan.num_tokens - num_prompt
        sampled = any(row.samples for row in plan.scheduled)
        return (
            math.hypot(self.layers_s, self.row_s * plan.num_tokens)
            + (self.head_s if sampled else 0.0)
            + self.prompt_attention_s * num_prompt
            + self.decode_attention_s * num_decode
        )


@dataclass
class Clients:
    """A closed loop of equal requests."""

    num_clients: int
    num_requests: int
    config: SchedulerConfig
    started_s: dict[int, float] = field(default_factory=dict)
    times_s: dict[int, list[float]] = field(default_factory=dict)
    duration_s: float = 0.0

    def run(self, device: Device) -> None:
        """Runs the loop to its end."""
        rng = random.Random(0)
        scheduler = Scheduler(
            self.config, CacheConfig(prefix_caching=False), device.memory(), model="virtual"
        )
        due = [_STAGGER_S * client for client in range(self.num_clients)]
        now, num_ended = 0.0, 0
        while num_ended < self.num_requests:
            while due and due[0] <= now and len(self.started_s) < self.num_requests:
                heapq.heappop(due)
                number = len(self.started_s)
                self.started_s[number], self.times_s[number] = now, []
                arrival = Arrival(now, _PROMPT, _ANSWER, "wave", "wave")
                scheduler.submit(new_request(number, arrival, rng), now)
            plan = scheduler.schedule(now)
            if plan.scheduled:
                now += device.seconds(plan)
            elif due:
                now = max(now, due[0])
            if plan.scheduled or plan.released:
                scheduler.update(plan_result(plan), now)
            for event in scheduler.take_events():
                self.times_s[event.request_id] += [now] * len(event.token_ids)
                if event.finish_reason is not None:
                    num_ended += 1
                    heapq.heappush(due, now + _TURN_S)
        self.duration_s = now


def main() -> None:
    """Runs the shapes of load with both limits of a step."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    target_ms = SchedulerConfig().step_target_ms
    for num_clients in (8, 32):
        for per_client in (1, 3, 12):
            for name, limit_ms in (("baseline: 1,024 tokens", 0.0), (f"ours: {target_ms:.0f} ms", target_ms)):
                loop = Clients(
                    num_clients, per_client * num_clients, SchedulerConfig(step_target_ms=limit_ms)
                )
                loop.run(Cores())
                first = [times[0] - loop.started_s[number] for number, times in loop.times_s.items()]
                gaps = [
                    after - before for times in loop.times_s.values() for before, after in pairwise(times)
                ]
                rows.append(
                    {
                        "clients": num_clients,
                        "requests each": per_client,
                        "steps": name,
                        "output tokens/s": loop.num_requests * _ANSWER / loop.duration_s,
                        "TTFT mean s": sum(first) / len(first),
                        "TTFT p99 s": percentile(first, 0.99),
                        "ITL p99 ms": percentile(gaps, 0.99) * 1000,
                    }
                )
    publish("Waves of requests (simulated device)", rows, options.json)


if __name__ == "__main__":
    main()
