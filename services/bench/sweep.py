"""Which arrival rate a server carries: requests arrive by a Poisson process at rates that bisection chooses.

A rate is kept where its run reaches every target. Rates are doubled until one is missed. Then the one in the
middle, on a scale of logarithms, follows until the highest kept and the lowest missed one lie close enough. A
run ends as soon as so many of its requests are late that no other can save it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from runtime.errors import ConfigError
from services.bench.client import BenchTarget
from services.bench.records import RequestRecord, Summary, Targets, summarize
from services.bench.run import run_workload
from services.bench.workload import Workload

# Why a sweep has ended: the rates lie close enough; the highest one allowed is kept; no more runs are
# allowed; even the lowest rate worth asking is missed.
SweepEnd = Literal["decided", "highest", "points", "lowest"]
# Requests a second; below it a run of a hundred requests takes hours.
_LOWEST_RATE = 0.02
# Where the load generator sends later than this, or is busy for this share of the time, it measures itself.
_LATE_MS, _BUSY_SHARE = 50.0, 0.9


class SweepTarget(msgspec.Struct, frozen=True, kw_only=True):
    """What a rate must keep; None asks nothing. A request that failed has kept nothing.

    `ttft_p99_ms` and `gap_p99_ms`: 99 of 100 requests, or gaps between pieces of answers, are not longer.
    `goodput`: this share of the requests reaches every one of `Targets`.
    """

    ttft_p99_ms: float | None = None
    gap_p99_ms: float | None = None
    goodput: float | None = None

    def allowed(self, num_planned: int) -> list[tuple[str, int]]:
        """For each target of whole requests: its name, and how many of so many may miss it."""
        shares = (("TTFT p99", None if self.ttft_p99_ms is None else 0.99), ("goodput", self.goodput))
        found = [(name, _rest(share, num_planned)) for name, share in shares if share is not None]
        return found if self.gap_p99_ms is None else [*found, ("gap p99", _rest(0.99, num_planned))]

    def has_missed(self, name: str, record: RequestRecord, targets: Targets) -> bool:
        """Whether a request counts against the target of this name. Of gaps only failures do so."""
        if name == "goodput":
            return not targets.met(record)
        late = name == "TTFT p99" and record.ok and record.ttft_s * 1000 > (self.ttft_p99_ms or 0)
        return late or not record.ok


def _rest(share: float, count: int) -> int:
    """How many of `count` may be outside of a share."""
    return count - math.ceil(share * count - 1e-9)


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One rate, in requests per second, and what was measured of it."""

    rate: float
    num_planned: int
    # Of those that had ended when the run was; fewer than planned where it was given up.
    summary: Summary
    ttft_p99_ms: float | None
    gap_p99_ms: float | None
    # Share of the planned requests within the targets of each; None without any.
    goodput: float | None
    # The targets that were missed; empty where the rate is kept.
    missed: list[str]
    # The load generator's own: 99th percentile of how late it sent, and the share of one core that it used.
    late_p99_ms: float
    busy_share: float

    @property
    def is_kept(self) -> bool:
        """Whether every target was reached."""
        return not self.missed

    @property
    def is_clients_limit(self) -> bool:
        """Whether the load generator could not send on time: it was not the server that was measured."""
        return self.late_p99_ms > _LATE_MS or self.busy_share > _BUSY_SHARE


class RateSearch:
    """Which rate comes next. `low` is the first one, `high` none is above, both in requests per second."""

    def __init__(self, *, low: float, high: float, precision: float, max_points: int) -> None:
        self._low, self._high, self._precision, self._max_points = low, high, precision, max_points
        self._num_points = 0
        self.kept: float | None = None
        self.missed: float | None = None

    def tell(self, rate: float, *, is_kept: bool) -> None:
        """What was measured of the rate that `next_rate` gave."""
        self._num_points += 1
        if is_kept:
            self.kept = rate
        else:
            self.missed = rate

    def next_rate(self) -> float | SweepEnd:
        """The rate to measure, or why there is none."""
        if self.kept is not None and self.missed is not None:
            if self.missed <= self.kept * (1 + self._precision):
                return "decided"
            following = math.sqrt(self.kept * self.missed)
        elif self.kept is not None:
            if self.kept >= self._high:
                return "highest"
            following = min(self.kept * 2, self._high)
        elif self.missed is not None:
            following = self.missed / 2
            if following < _LOWEST_RATE:
                return "lowest"
        else:
            following = self._low
        return following if self._num_points < self._max_points else "points"


async def measure_rate(
    target: BenchTarget,
    workload: Workload,
    model: str,
    *,
    wanted: SweepTarget,
    targets: Targets,
    num_warmup: int,
    limit_s: float,
    on_progress: Callable[[], None],
) -> SweepPoint:
    """Runs an open loop until it is over or lost; raises ConfigError where no rate would be answered."""
    ended: list[RequestRecord] = []
    num_missed = dict.fromkeys((name for name, _ in wanted.allowed(workload.num_requests)), 0)
    limits = dict(wanted.allowed(workload.num_requests))
    run: asyncio.Task[tuple[list[RequestRecord], float]]

    def advance(record: RequestRecord) -> None:
        ended.append(record)
        on_progress()
        for name in num_missed:
            num_missed[name] += wanted.has_missed(name, record, targets)
            if num_missed[name] > limits[name]:
                run.cancel()

    run = asyncio.create_task(
        run_workload(target, workload, model, num_warmup=num_warmup, limit_s=limit_s, on_progress=advance)
    )
    began_busy_s, began_s = time.process_time(), time.perf_counter()
    try:
        _, duration_s = await run
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and caller.cancelling():
            raise
        duration_s = time.perf_counter() - min(record.start_s for record in ended)
    _check_answered(ended)
    busy_share = (time.process_time() - began_busy_s) / (time.perf_counter() - began_s)
    return point_of(ended, workload, duration_s, busy_share, wanted, targets)


def _check_answered(ended: Sequence[RequestRecord]) -> None:
    """Raises ConfigError for requests that are refused at whatever rate."""
    if all(record.is_wrong for record in ended):
        raise ConfigError(f"no request is answered, at whatever rate: {ended[0].error}")


def point_of(
    ended: Sequence[RequestRecord],
    workload: Workload,
    duration_s: float,
    busy_share: float,
    wanted: SweepTarget,
    targets: Targets,
) -> SweepPoint:
    """The figures of a run, and which targets it has missed."""
    num_planned = workload.num_requests
    missed = [
        name
        for name, allowed in wanted.allowed(num_planned)
        if sum(wanted.has_missed(name, record, targets) for record in ended) > allowed
    ]
    gap_p99 = p99_ms([gap for record in ended if record.ok for gap in record.itls_s])
    is_slow = wanted.gap_p99_ms is not None and gap_p99 is not None and gap_p99 > wanted.gap_p99_ms
    if is_slow and "gap p99" not in missed:
        missed.append("gap p99")
    num_met = sum(targets.met(record) for record in ended)
    return SweepPoint(
        rate=round(workload.arrivals.rate, 4),
        num_planned=num_planned,
        summary=summarize(ended, duration_s, targets),
        ttft_p99_ms=p99_ms([record.ttft_s for record in ended if record.ok]),
        gap_p99_ms=gap_p99,
        goodput=round(num_met / num_planned, 4) if targets.given else None,
        missed=missed,
        late_p99_ms=p99_ms([record.late_s for record in ended]) or 0.0,
        busy_share=round(busy_share, 3),
    )


def p99_ms(seconds: Sequence[float]) -> float | None:
    """The least value, in milliseconds, that 99 of 100 do not exceed; None of nothing."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    return round(ordered[math.ceil(0.99 * len(ordered) - 1e-9) - 1] * 1000, 3)
