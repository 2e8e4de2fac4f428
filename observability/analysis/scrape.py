"""Reads the Prometheus endpoints of running services and turns two readings into rates and percentiles."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from observability.emit.names import Metric

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reading:
    """All samples of one endpoint at one moment. `at_s` is monotonic; `error` is "" when it answered."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float] = field(default_factory=dict)
    error: str = ""

    def value(self, metric: Metric, **labels: str) -> float:
        """Sum over all series that have these labels; 0 when there is none."""
        return sum(self._matching(metric.name, labels).values())

    def values_by(self, metric: Metric, label: str) -> dict[str, float]:
        """Value of `label` to the sum over its series."""
        found: dict[str, float] = {}
        for labels, value in self._matching(metric.name, {}).items():
            name = dict(labels).get(label, "")
            found[name] = found.get(name, 0.0) + value
        return found

    def buckets(self, metric: Metric, **labels: str) -> dict[float, float]:
        """Upper bound to cumulative count, over all series that have these labels."""
        found: dict[float, float] = {}
        for key, value in self._matching(f"{metric.name}_bucket", labels).items():
            bound = float(dict(key)["le"])
            found[bound] = found.get(bound, 0.0) + value
        return dict(sorted(found.items()))

    def _matching(self, name: str, wanted: Mapping[str, str]) -> dict[Labels, float]:
        return {
            labels: value
            for (sample, labels), value in self.samples.items()
            if sample == name and wanted.items() <= dict(labels).items()
        }


def parse(text: str, at_s: float) -> Reading:
    """A reading from the text format."""
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return Reading(at_s, samples)


async def scrape(targets: Mapping[str, str], *, timeout_s: float = 2.0) -> dict[str, Reading]:
    """Name to reading of every target (host:port), all at once. One that does not answer gets an error."""
    loop = asyncio.get_running_loop()

    async def one(client: httpx.AsyncClient, address: str) -> Reading:
        try:
            answer = await client.get(f"http://{address}/metrics")
            answer.raise_for_status()
            return parse(answer.text, loop.time())
        except (httpx.HTTPError, ValueError) as error:
            return Reading(loop.time(), error=type(error).__name__)

    # Nothing between this machine and its services is to be asked through a proxy.
    async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
        readings = await asyncio.gather(*(one(client, address) for address in targets.values()))
    return dict(zip(targets, readings, strict=True))


@dataclass(frozen=True)
class Interval:
    """What happened between two readings of one endpoint."""

    before: Reading
    after: Reading

    @property
    def seconds(self) -> float:
        """Length of the interval."""
        return max(1e-9, self.after.at_s - self.before.at_s)

    def rate(self, metric: Metric, **labels: str) -> float:
        """Increase of a counter per second. A restart counts from zero."""
        before, after = self.before.value(metric, **labels), self.after.value(metric, **labels)
        return (after - before if after >= before else after) / self.seconds

    def percentile(self, metric: Metric, share: float, **labels: str) -> float | None:
        """Of a histogram's observations in the interval, interpolated in its bucket; None without any."""
        after = self.after.buckets(metric, **labels)
        before = self.before.buckets(metric, **labels)
        counts = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
        total = max(counts.values(), default=0.0)
        if total <= 0:
            return None
        wanted = share * total
        lower, below = 0.0, 0.0
        for bound, count in counts.items():
            if count >= wanted:
                if bound == float("inf"):
                    return lower
                inside = count - below
                return lower + (bound - lower) * ((wanted - below) / inside if inside else 1.0)
            lower, below = bound, count
        return lower
