"""Prometheus metrics from the declarations in names.py: bounded labels, exemplars that link to traces."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar
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

from observability.emit.names import Metric
from runtime.errors import ConfigError

# For observations that no trace is to be linked to.
NO_EXEMPLAR = trace.INVALID_SPAN_CONTEXT
# Value of a bounded label beyond its bound.
OTHER = "other"
# Labels whose values clients choose, directly or not.
_BOUNDED_LABELS = frozenset({"tenant", "adapter", "engine"})

# Combinations of labels that one family keeps; of further ones those labels are OTHER. A histogram has some
# twenty series for each.
_MAX_COMBINATIONS = 2_000

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class _Histogram(Histogram):
    """The library's, whose buckets are searched and not tried one by one: every token is observed."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
        """See Histogram."""
        if exemplar is not None:
            super().observe(amount, exemplar)
            return
        self._sum.inc(amount)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(1)


_FAMILY = {"counter": Counter, "gauge": Gauge, "histogram": _Histogram}


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


class Metrics:
    """The metrics of one process. Families appear with their first value; thread-safe. A counter appears with
    every value of the labels whose values are declared, at 0 but for the one that is counted: Prometheus does
    not see the first event of a series that begins with it.

    Values are given by the declaration and its labels: `metrics.observe(names.TTFT_PART, 0.2, part="queue",
    tier="standard")`. A label that the declaration lacks, or one too few, is a ValueError.
    """

    def __init__(self, *, max_label_values: int = 100) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        # By name, then pairs of label and value.
        self._series: dict[tuple[Any, ...], Counter | Gauge | Histogram] = {}
        self._num_combinations: Counts[str] = Counts()
        self._bounds = {label: _Bound(max_label_values) for label in _BOUNDED_LABELS}
        self._lock = threading.Lock()
        self._server: tuple[WSGIServer, threading.Thread] | None = None

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter. Raises ValueError for what is below 0."""
        self._one(Counter, metric, labels).inc(amount)

    def begin(self, metric: Metric, **labels: str) -> None:
        """Has a counter exist before its first event; labels whose values are declared are left out."""
        self._one(Counter, metric, labels | {label: known[0] for label, known in metric.values.items()})

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        self._one(Gauge, metric, labels).set(value)

    def set_function(self, metric: Metric, function: Callable[[], float], **labels: str) -> None:
        """Reads a gauge's value from `function` at every scrape."""
        self._one(Gauge, metric, labels).set_function(function)

    def observe(
        self, metric: Metric, value: float, *, span: SpanContext | None = None, **labels: str
    ) -> None:
        """Adds an observation to a histogram; a sampled `span` (default: the current one) is its exemplar."""
        exemplar = None
        if span is not NO_EXEMPLAR:
            context = span or trace.get_current_span().get_span_context()
            if context.is_valid and context.trace_flags.sampled:
                exemplar = {"trace_id": f"{context.trace_id:032x}"}
        self._one(Histogram, metric, labels).observe(value, exemplar)

    def observer(self, metric: Metric, **labels: str) -> Callable[[float], None]:
        """What adds observations without exemplars to one series: for values that come with every token."""
        return self._one(Histogram, metric, labels).observe

    def remove(self, metric: Metric, **labels: str) -> None:
        """Forgets one labelled value, for example of an engine that is gone."""
        with self._lock:
            for key in [key for key in self._series if key[0] == metric.name and dict(key[1:]) == labels]:
                del self._series[key]
            family = self._families.get(metric.name)
            if family is not None:
                family.remove(*(labels[name] for name in metric.labels))

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """(body, content type) for an Accept header; OpenMetrics, which has the exemplars, where accepted."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

    def serve(self, listen: str, key: str) -> str:
        """Serves /metrics on host:port, on a daemon thread; the address, with the port that 0 took. Empty
        turns it off. Raises ConfigError naming `key` when it cannot bind.
        """
        if not listen:
            return ""
        host, _, port = listen.rpartition(":")
        try:
            self._server = start_http_server(int(port), host or "127.0.0.1", self.registry)
        except OSError as error:
            raise ConfigError(f"{key}: {listen}: {error}") from error
        server = self._server[0]
        return f"{server.server_address[0]!s}:{server.server_port}"

    def close(self) -> None:
        """Stops serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def _one(self, kind: type[_Kind], metric: Metric, labels: dict[str, str]) -> _Kind:
        # The order of the labels is the caller's: two orders are two ways to the same series.
        series = self._series.get((metric.name, *labels.items()))
        if series is None:
            series = self._new(metric, labels)
        assert isinstance(series, kind), f"{metric.name} is a {metric.kind}"
        return series

    def _new(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        # Values beyond a label's bound are replaced before anything is kept of them.
        for label in _BOUNDED_LABELS.intersection(labels):
            labels[label] = self._bounds[label].value(labels[label])
        with self._lock:
            family = self._family(metric)
            if self._num_combinations[metric.name] >= _MAX_COMBINATIONS:
                labels |= dict.fromkeys(_BOUNDED_LABELS.intersection(labels), OTHER)
            series = self._keep(metric, family, labels)
            for values in product(*metric.values.values()):
                self._keep(metric, family, labels | dict(zip(metric.values, values, strict=True)))
        return series

    def _keep(
        self, metric: Metric, family: Counter | Gauge | Histogram, labels: dict[str, str]
    ) -> Counter | Gauge | Histogram:
        key = (metric.name, *labels.items())
        if key not in self._series:
            self._series[key] = family.labels(**labels) if metric.labels else family
            self._num_combinations[metric.name] += 1
        return self._series[key]

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
