"""The rule that counts wanted engines over a day, beside oracles that know every arrival.

    python -m benchmarks.scaling [--trace FILE | --rate R] [--hours 24] [--window 300] [--json OUT]

The load is Poisson with a day's shape, or a trace as `millrace simulate` takes it. Engines take a minute
to start. Two oracles know what comes in every window, and pay each start: one holds the least number that
keeps the targets of the wanted part of each window's requests; one gives engines to the windows in which they
keep most, until that part of the day's requests is kept. "best constant" is the least number for the whole
day. All are compared at the goodput that the rule reached. Everything runs in virtual time.
"""

from __future__ import annotations

import argparse
import heapq
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.stack import write_result
from engine.config import CacheConfig, SchedulerConfig
from gateway.settings import load_settings
from gateway.tiers import Tiers
from services.bench.workload import Lengths
from services.simulate.arrivals import ArrivingRequest, GeneratedLoad, read_trace
from services.simulate.outcome import Objective, run_figures
from services.simulate.scenario import Scaling, Scenario
from services.simulate.step_model import StepModel, assumed, speed_of

# An engine that one request in two seconds fills, so that few requests are a day's.
_SLOW = StepModel(0.1, 0.02, 0.0, 0.04, 0.008, 0.0)
_LOAD_S = 60.0
_MOST = 64


def scenario(load: tuple[ArrivingRequest, ...] | GeneratedLoad) -> Scenario:
    """A day on engines that come and go by the rule, as the defaults set it but for the time of a start."""
    gateway = {"default_tier": "standard", "autoscaling": {"load_s": _LOAD_S, "hold_s": 2 * _LOAD_S}}
    settings = load_settings(
        {
            "model": {"path": "model"},
            "gateway": gateway,
            "tiers": {"standard": {"priority": 10, "ttft_target_ms": 6000, "admission": "best_effort"}},
        }
    )
    limits = msgspec.structs.replace(SchedulerConfig(), max_num_seqs=16)
    engine = assumed(limits, CacheConfig())
    return Scenario(
        load=load,
        setup=msgspec.structs.replace(
            engine, name="slow", model=_SLOW, speed=speed_of(_SLOW), load_s=_LOAD_S
        ),
        config=settings.gateway,
        tiers=Tiers(settings),
        objectives={"standard": Objective(ttft_s=6.0, tpot_s=1.0)},
        scaling=Scaling(least=1, most=_MOST),
    )


def windows(arrivals: Sequence[ArrivingRequest], window_s: float) -> list[tuple[ArrivingRequest, ...]]:
    """Each window's arrivals, from its own beginning."""
    found: list[list[ArrivingRequest]] = [[] for _ in range(1 + int(arrivals[-1].at_s // window_s))]
    for each in arrivals:
        number, at_s = divmod(each.at_s, window_s)
        found[int(number)].append(each._replace(at_s=at_s))
    return [tuple(part) for part in found]


def engine_seconds(counts: Sequence[int], window_s: float) -> float:
    """What so many engines in each window cost, starts included."""
    starts = sum(max(0, count - before) for before, count in zip([1, *counts], counts, strict=False))
    return sum(counts) * window_s + starts * _LOAD_S


class Oracle:
    """Knows how many requests of each window so many engines would keep."""

    def __init__(self, asked: Scenario, window_s: float) -> None:
        self._asked = msgspec.structs.replace(asked, scaling=None)
        self._windows = windows(asked.arrivals(0), window_s)
        self._kept: dict[tuple[int, int], int] = {}

    def kept(self, window: int, count: int) -> int:
        """Requests of a window that keep their targets with so many engines."""
        key = window, count
        if key not in self._kept:
            load = self._windows[window]
            run = msgspec.structs.replace(self._asked, load=load).run(count, 0) if load else None
            self._kept[key] = round(run.total.goodput * len(load)) if run else 0
        return self._kept[key]

    def by_window(self, share: float) -> list[int]:
        """The least number of engines of each window that keep this part of its requests."""
        counts: list[int] = []
        for window, load in enumerate(self._windows):
            count = 1
            while self.kept(window, count) < share * len(load) and count < _MOST:
                count += 1
            counts.append(count)
        return counts

    def by_day(self, share: float) -> list[int]:
        """Engines for the windows in which one more keeps most, until this part of the day's is kept."""
        counts = [1] * len(self._windows)
        total = sum(self.kept(window, 1) for window in range(len(counts)))
        wanted = math.ceil(share * sum(map(len, self._windows)))
        gains = [self._gain(window, 1) for window in range(len(counts))]
        heapq.heapify(gains)
        while total < wanted:
            _, window, more, gain = heapq.heappop(gains)
            counts[window] += more
            total += gain
            heapq.heappush(gains, self._gain(window, counts[window]))
        return counts

    def _gain(self, window: int, count: int) -> tuple[float, int, int, int]:
        """(less the requests for each engine, window, engines more, requests more): the best of the next."""
        before = self.kept(window, count)
        found = ((self.kept(window, count + more) - before, more) for more in (1, 2, 3))
        return min((-gain / more, window, more, gain) for gain, more in found)


def rows_of(asked: Scenario, window_s: float) -> list[dict[str, Any]]:
    """The rule, both oracles, and the best constant number."""
    begun = time.perf_counter()
    fleet = asked.served(1, 0)
    took_s = time.perf_counter() - begun
    figures = run_figures(fleet, asked.objectives)
    share, end_s = figures.total.goodput, fleet.clock.now
    oracle = Oracle(asked, window_s)
    alone = msgspec.structs.replace(asked, scaling=None)
    constant, _ = alone.smallest([0], share, _MOST, lambda count, worst: None)
    costs = {
        "ours: the rule": figures.engine_s,
        "baseline: oracle by window": engine_seconds(oracle.by_window(share), window_s),
        "baseline: oracle of the day": engine_seconds(oracle.by_day(share), window_s),
        "baseline: best constant": (constant or _MOST) * end_s,
    }
    return [
        {
            "engines": name,
            "engine-hours": cost / 3600,
            "of ours %": 100 * cost / figures.engine_s,
            "goodput %": 100 * share,
            "requests": len(fleet.served),
            "times real": end_s / took_s if name.startswith("ours") else None,
        }
        for name, cost in costs.items()
    ]


def main() -> None:
    """Runs, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--rate", type=float, default=0.8, help="requests/s, a day's mean")
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--window", type=float, default=300.0, help="seconds that an oracle holds a number")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load: tuple[ArrivingRequest, ...] | GeneratedLoad
    if options.trace is not None:
        load = tuple(read_trace(options.trace, ["standard"]))
    else:
        load = GeneratedLoad(
            rate=options.rate,
            duration_s=3600 * options.hours,
            pattern="diurnal",
            input_tokens=Lengths.parse("lognormal:100:0.5"),
            output_tokens=Lengths.parse("40"),
        )
    rows = rows_of(scenario(load), options.window)
    table = Table(*rows[0], box=None)
    for row in rows:
        table.add_row(
            *(f"{each:.4g}" if isinstance(each, float) else str(each or "") for each in row.values())
        )
    Console().print(table)
    title = f"Engine-hours of {options.hours:g} hours at equal goodput, in windows of {options.window:g} s"
    write_result(options.json, {"title": title, "rows": rows})


if __name__ == "__main__":
    main()
