"""Prometheus metrics from the declarations in names.py: bounded labels, exemplars that link to traces."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIServer

from opentelemetry import trace
from opentelemetry.trace import SpanContext
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    start_http_server,
)
from prometheus_client.exposition import choose_encoder

from observability import names
from observability.names import Metric

# For observations that no trace is to be linked to.
NO_EXEMPLAR = trace.INVALID_SPAN_CONTEXT
# Value of a bounded label beyond its bound.
OTHER = "other"
# A series gets an exemplar this often at most.
_EXEMPLAR_INTERVAL_S = 0.25
# So many values of a series wait at most until they are counted.
_MAX_WAITING = 4096
# Labels whose values clients choose, directly or not.
_BOUNDED_LABELS = frozenset({"tenant", "adapter", "engine"})

_FAMILY = {"counter": Counter, "gauge": Gauge, "histogram": Histogram}


@dataclass
class _Bound:
    limit: int
    seen: set[str] = field(default_factory=set)

    def value(self, text: str) -> str:
        if text in self.seen:
            return text
        if len(self.seen) >= self.limit:
            return OTHER
        self.seen.add(text)
        return text


class _Counted:
    """A counter's series. Amounts wait until somebody looks: one by one, the client library takes longer for
    them than their makers for much of what they count.
    """

    __slots__ = ("_lock", "child", "waiting")

    def __init__(self, child: Counter) -> None:
        self.child = child
        # Threads append to it as they like: it is always the same list.
        self.waiting: list[float] = []
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Counts what waits."""
        with self._lock:
            taken = self.waiting[:]
            del self.waiting[: len(taken)]
            self.child.inc(sum(taken))


class _Observed:
    """The same of a histogram."""

    __slots__ = ("_bounds", "_lock", "child", "exemplar_due_s", "waiting")

    def __init__(self, child: Histogram, bounds: Sequence[float]) -> None:
        self.child = child
        self.waiting: list[float] = []
        # When it takes its next exemplar.
        self.exemplar_due_s = 0.0
        self._bounds = bounds
        self._lock = threading.Lock()

    def settle(self) -> None:
        """Counts what waits."""
        with self._lock:
            taken = self.waiting[:]
            del self.waiting[: len(taken)]
            self.add(Tally(map(partial(bisect_left, self._bounds), taken)).items(), sum(taken))

    def add(self, counts: Iterable[tuple[int, int]], total: float) -> None:
        """Adds numbers of observations by bucket, whose values sum to `total`."""
        # The client library has no public way to add several observations at once.
        for bucket, count in counts:
            if count:
                self.child._buckets[bucket].inc(count)
        self.child._sum.inc(total)


class _Registry(CollectorRegistry):
    """Has everything counted before it is read."""

    def __init__(self, settle: Callable[[], None]) -> None:
        super().__init__()
        self._settle = settle

    def collect(self) -> Iterable[Any]:
        """See CollectorRegistry."""
        self._settle()
        return super().collect()

    def restricted_registry(self, names: Iterable[str]) -> Any:
        """See CollectorRegistry."""
        self._settle()
        return super().restricted_registry(names)


class MetricsServer:
    """A Prometheus endpoint on its own thread."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread
        # host:port, with the real port where 0 was asked for.
        self.address = f"{server.server_address[0]!s}:{server.server_port}"

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Metrics:
    """The metrics of one process. Families appear with their first value; thread-safe.

    Values are given by the declaration and its labels: `metrics.observe(names.TTFT_PART, 0.2, part="queue",
    tier="standard")`. A label that the declaration lacks, or one too few, is a ValueError.
    """

    def __init__(self, *, max_label_values: int = 100) -> None:
        self.registry = _Registry(self._settle)
        ProcessCollector(registry=self.registry)
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        # By name, then pairs of label and value.
        self._counted: dict[tuple[Any, ...], _Counted] = {}
        self._observed: dict[tuple[Any, ...], _Observed] = {}
        self._gauges: dict[tuple[Any, ...], Gauge] = {}
        self._bounds = {label: _Bound(max_label_values) for label in _BOUNDED_LABELS}
        self._lock = threading.Lock()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter. Raises ValueError for what is below 0."""
        series = self._counted.get((metric.name, *labels.items()))
        if series is None:
            series = self._new_counted(metric, labels)
        if amount < 0:
            raise ValueError(f"{metric.name} is a counter: {amount} cannot be added")
        waiting = series.waiting
        waiting.append(amount)
        if len(waiting) >= _MAX_WAITING:
            series.settle()

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._gauge(metric, labels).set(value)

    def shift(self, metric: Metric, amount: float, **labels: str) -> None:
        """Adds to a gauge, or takes away from it."""
        self._gauge(metric, labels).inc(amount)

    def merge(self, metric: Metric, counts: Sequence[int], total: float, **labels: str) -> None:
        """Adds observations that were counted by bucket elsewhere, where one at a time would cost too much.

        `counts` has one number per bucket of the declaration and one for what is above; `total` is their sum
        of values.
        """
        series = self._observed.get((metric.name, *labels.items()))
        if series is None:
            series = self._new_observed(metric, labels)
        assert len(counts) == len(metric.buckets) + 1, f"{metric.name} has {len(metric.buckets)} buckets"
        series.add(enumerate(counts), total)

    def set_function(self, metric: Metric, function: Callable[[], float], **labels: str) -> None:
        """Reads a gauge's value from `function` at every scrape."""
        self._gauge(metric, labels).set_function(function)

    def observe(
        self, metric: Metric, value: float, *, span: SpanContext | None = None, **labels: str
    ) -> None:
        """Adds an observation to a histogram; a sampled `span` (default: the current one) is its exemplar."""
        series = self._observed.get((metric.name, *labels.items()))
        if series is None:
            series = self._new_observed(metric, labels)
        if span is not NO_EXEMPLAR:
            now_s = time.monotonic()
            if now_s >= series.exemplar_due_s:
                context = span or trace.get_current_span().get_span_context()
                if context.is_valid and context.trace_flags.sampled:
                    # A scrape takes the newest one only, and the client library looks at each for long.
                    series.exemplar_due_s = now_s + _EXEMPLAR_INTERVAL_S
                    series.child.observe(value, {"trace_id": f"{context.trace_id:032x}"})
                    return
        waiting = series.waiting
        waiting.append(value)
        if len(waiting) >= _MAX_WAITING:
            series.settle()

    def remove(self, metric: Metric, **labels: str) -> None:
        """Forgets one labelled value, for example of an engine that is gone."""
        with self._lock:
            of_kind: dict[tuple[Any, ...], Any]
            for of_kind in (self._counted, self._observed, self._gauges):
                for key in [key for key in of_kind if key[0] == metric.name]:
                    if dict(key[1:]) == labels:
                        del of_kind[key]
            family = self._families.get(metric.name)
            if family is not None:
                family.remove(*(labels[name] for name in metric.labels))

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) for an Accept header; OpenMetrics, which has the exemplars, where accepted."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def serve(self, listen: str) -> MetricsServer:
        """Serves /metrics on host:port; port 0 takes a free one. Raises OSError when it cannot bind."""
        host, _, port = listen.rpartition(":")
        server, thread = start_http_server(int(port), host or "127.0.0.1", self.registry)
        return MetricsServer(server, thread)

    def _settle(self) -> None:
        with self._lock:
            series: list[_Counted | _Observed] = [*self._counted.values(), *self._observed.values()]
        for each in series:
            if each.waiting:
                each.settle()

    # The order of the labels is the caller's: two orders are two ways to the same value.

    def _new_counted(self, metric: Metric, labels: dict[str, str]) -> _Counted:
        child = self._child(metric, labels)
        assert isinstance(child, Counter), f"{metric.name} is a {metric.kind}"
        with self._lock:
            return self._counted.setdefault((metric.name, *labels.items()), _Counted(child))

    def _new_observed(self, metric: Metric, labels: dict[str, str]) -> _Observed:
        child = self._child(metric, labels)
        assert isinstance(child, Histogram), f"{metric.name} is a {metric.kind}"
        series = _Observed(child, metric.buckets)
        with self._lock:
            return self._observed.setdefault((metric.name, *labels.items()), series)

    def _gauge(self, metric: Metric, labels: dict[str, str]) -> Gauge:
        child = self._gauges.get((metric.name, *labels.items()))
        if child is None:
            found = self._child(metric, labels)
            assert isinstance(found, Gauge), f"{metric.name} is a {metric.kind}"
            with self._lock:
                child = self._gauges[metric.name, *labels.items()] = found
        return child

    def _child(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        """The client library's own series. Labels are bounded in place: nothing is kept of others."""
        for label in _BOUNDED_LABELS.intersection(labels):
            labels[label] = self._bounds[label].value(labels[label])
        with self._lock:
            family = self._family(metric)
            return family.labels(**labels) if metric.labels else family

    def _family(self, metric: Metric) -> Counter | Gauge | Histogram:
        family = self._families.get(metric.name)
        if family is None:
            options = {"buckets": metric.buckets} if metric.buckets else {}
            family = _FAMILY[metric.kind](
                # The client library adds the suffix of counters itself.
                metric.name.removesuffix("_total"),
                f"{metric.meaning} [{metric.unit}]",
                metric.labels,
                registry=self.registry,
                **options,  # type: ignore[arg-type]
            )
            self._families[metric.name] = family
        return family


def set_build_info(metrics: Metrics, service: str, version: str, model: str = "") -> None:
    """Every service's first metric."""
    metrics.set(names.BUILD_INFO, 1, service=service, version=version, model=model)
