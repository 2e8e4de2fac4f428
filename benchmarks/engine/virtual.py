"""The real scheduler under a virtual clock: a step costs what a cost model says, and no time passes.

Only the device is modelled (a fixed cost per step and one per token); every decision is made by the code
that serves. A run of minutes takes seconds, and is the same on every machine.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.config import CacheConfig, SchedulerConfig
from engine.scheduler import Scheduler
from engine.types import (
    NOT_MEASURED,
    FinishReason,
    MeasuredSpeed,
    MemoryPlan,
    Request,
    SamplingParams,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenEvent,
)

# A token id that no request stops at.
_TOKEN = 7


@dataclass(frozen=True)
class Device:
    """Cost of a step: about an 8-billion-parameter model on one data-centre GPU."""

    step_s: float = 0.006
    token_s: float = 0.00002
    num_blocks: int = 16_384
    block_size: int = 16
    max_model_len: int = 32_768

    def seconds(self, plan: SchedulerOutput) -> float:
        """Duration of a step."""
        return self.step_s + self.token_s * plan.num_tokens

    def memory(self) -> MemoryPlan:
        """The memory plan of this device; only counts matter."""
        return MemoryPlan.of_counts(self.num_blocks, self.block_size, self.max_model_len)


@dataclass(frozen=True)
class Arrival:
    """One request of a workload."""

    at_s: float
    num_prompt_tokens: int
    max_tokens: int
    kind: str
    tenant: str = ""
    priority: int = 0
    ttft_target_s: float | None = None
    queue_limit_s: float | None = None
    weight: float = 1.0
    # Choices.
    n: int = 1
    # Requests of the same number have the same prompt; None gives one of its own.
    prompt: int | None = None
    tpot_target_s: float | None = None


@dataclass
class Served:
    """What became of it."""

    arrival: Arrival
    token_times_s: list[float] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: str = ""
    # What a refusal said.
    retry_after_s: float | None = None
    num_preemptions: int = 0
    # Taken into the queue, and not refused by the answer to its submission.
    accepted: bool = False
    ended_s: float = 0.0
    # Time until the first step that computed something of it; None when there was none.
    queue_s: float | None = None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token."""
        return self.token_times_s[0] - self.arrival.at_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time for a token after the first."""
        times = self.token_times_s
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        """Time between tokens."""
        return [
            after - before for before, after in zip(self.token_times_s, self.token_times_s[1:], strict=False)
        ]


@dataclass
class Outcome:
    """One simulated run."""

    served: list[Served]
    duration_s: float

    def of(self, kind: str) -> list[Served]:
        """Requests of one kind."""
        return [each for each in self.served if each.arrival.kind == kind]


def poisson(rng: random.Random, rate_per_s: float, until_s: float) -> Iterable[float]:
    """Arrival times."""
    now = rng.expovariate(rate_per_s)
    while now < until_s:
        yield now
        now += rng.expovariate(rate_per_s)


def simulate(
    arrivals: list[Arrival],
    config: SchedulerConfig,
    device: Device,
    *,
    stop_s: float | None = None,
    speed: MeasuredSpeed = NOT_MEASURED,
    follows: Callable[[Served], Iterable[Arrival]] | None = None,
) -> Outcome:
    """Runs the workload to its end, or until `stop_s`. `follows` says what comes after a request that was
    refused or has ended. `speed` is what the engine measured before its first request.
    """
    rng = random.Random(0)
    scheduler = Scheduler(
        config, CacheConfig(prefix_caching=False), device.memory(), model="virtual", speed=speed
    )
    queue = [(arrival.at_s, index, arrival) for index, arrival in enumerate(arrivals)]
    heapq.heapify(queue)
    served = [Served(arrival) for arrival in arrivals]
    now = 0.0

    def book(events: list[TokenEvent]) -> None:
        for one in _book(events, served, now):
            for arrival in follows(one) if follows else ():
                heapq.heappush(queue, (arrival.at_s, len(served), arrival))
                served.append(Served(arrival))

    while (queue or scheduler.has_work) and (stop_s is None or now < stop_s):
        while queue and queue[0][0] <= now:
            _, index, arrival = heapq.heappop(queue)
            scheduler.submit(new_request(index, arrival, rng), now)
            refusals = scheduler.drain_events()
            served[index].accepted = not refusals
            book(refusals)
        plan = scheduler.schedule(now)
        if plan.scheduled:
            now += device.seconds(plan)
        if plan.scheduled or plan.released:
            scheduler.update(plan_result(plan), now)
        elif queue:
            now = max(now, queue[0][0])
        book(scheduler.drain_events())
    return Outcome(served, now)


def _book(events: list[TokenEvent], served: list[Served], now: float) -> list[Served]:
    """Takes the events in; returns what was refused or has ended."""
    over = []
    for event in events:
        one = served[event.request_id]
        one.token_times_s += [now] * len(event.token_ids)
        one.finish = event.finish_reason or one.finish
        one.ended_s = now
        if event.failure:
            one.failure, one.retry_after_s = event.failure.reason, event.failure.retry_after_s
        if event.first_token:
            one.queue_s = event.first_token.first_scheduled_s - event.first_token.arrival_s
        if event.statistics:
            one.num_preemptions = event.statistics.num_preemptions
        if event.failure or event.finish_reason:
            over.append(one)
    return over


def new_request(index: int, arrival: Arrival, rng: random.Random) -> Request:
    at = arrival.at_s
    if arrival.prompt is not None:
        rng = random.Random(arrival.prompt)
    return Request(
        request_id=index,
        external_id=str(index),
        prompt_token_ids=tuple(rng.randrange(1 << 15) for _ in range(arrival.num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=arrival.max_tokens, n=arrival.n, best_of=arrival.n),
        tenant=arrival.tenant,
        tier=arrival.kind,
        priority=arrival.priority,
        weight=arrival.weight,
        arrival_s=at,
        tpot_target_s=arrival.tpot_target_s,
        ttft_deadline_s=None if arrival.ttft_target_s is None else at + arrival.ttft_target_s,
        queue_deadline_s=None if arrival.queue_limit_s is None else at + arrival.queue_limit_s,
    )


def plan_result(plan: SchedulerOutput) -> StepResult:
    results = tuple(
        SequenceResult(row.sequence_id, (_TOKEN,) if row.samples else ()) for row in plan.scheduled
    )
    return StepResult(plan.step_id, results)
