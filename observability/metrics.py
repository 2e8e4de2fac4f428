"""Prometheus metrics from the declarations in names.py: bounded labels, exemplars that link to traces."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._families: dict[str, Counter | Gauge | Histogram] = {}
        # By name, then pairs of label and value.
        self._children: dict[tuple[Any, ...], Counter | Gauge | Histogram] = {}
        # When each series takes its next exemplar.
        self._exemplar_due_s: dict[Histogram, float] = {}
        self._bounds = {label: _Bound(max_label_values) for label in _BOUNDED_LABELS}
        self._lock = threading.Lock()

    def add(self, metric: Metric, amount: float = 1.0, **labels: str) -> None:
        """Adds to a counter."""
        child = self._child(metric, labels)
        assert isinstance(child, Counter), f"{metric.name} is a {metric.kind}"
        child.inc(amount)

    def set(self, metric: Metric, value: float, **labels: str) -> None:
        """Sets a gauge."""
        child = self._child(metric, labels)
        assert isinstance(child, Gauge), f"{metric.name} is a {metric.kind}"
        child.set(value)

    def shift(self, metric: Metric, amount: float, **labels: str) -> None:
        """Adds to a gauge, or takes away from it."""
        child = self._child(metric, labels)
        assert isinstance(child, Gauge), f"{metric.name} is a {metric.kind}"
        child.inc(amount)

    def merge(self, metric: Metric, counts: Sequence[int], total: float, **labels: str) -> None:
        """Adds observations that were counted by bucket elsewhere, where one at a time would cost too much.

        `counts` has one number per bucket of the declaration and one for what is above; `total` is their sum
        of values.
        """
        child = self._child(metric, labels)
        assert isinstance(child, Histogram), f"{metric.name} is a {metric.kind}"
        # The client library has no public way to add several observations at once.
        for bucket, count in zip(child._buckets, counts, strict=True):
            if count:
                bucket.inc(count)
        child._sum.inc(total)

    def set_function(self, metric: Metric, function: Callable[[], float], **labels: str) -> None:
        """Reads a gauge's value from `function` at every scrape."""
        child = self._child(metric, labels)
        assert isinstance(child, Gauge), f"{metric.name} is a {metric.kind}"
        child.set_function(function)

    def observe(
        self, metric: Metric, value: float, *, span: SpanContext | None = None, **labels: str
    ) -> None:
        """Adds an observation to a histogram; a sampled `span` (default: the current one) is its exemplar."""
        child = self._child(metric, labels)
        assert isinstance(child, Histogram), f"{metric.name} is a {metric.kind}"
        now_s = time.monotonic()
        if span is NO_EXEMPLAR or now_s < self._exemplar_due_s.get(child, 0.0):
            child.observe(value)
            return
        context = span or trace.get_current_span().get_span_context()
        if context.is_valid and context.trace_flags.sampled:
            # A scrape takes the newest one only, and the client library looks at each of them for long.
            self._exemplar_due_s[child] = now_s + _EXEMPLAR_INTERVAL_S
            child.observe(value, {"trace_id": f"{context.trace_id:032x}"})
        else:
            child.observe(value)

    def remove(self, metric: Metric, **labels: str) -> None:
        """Forgets one labelled value, for example of an engine that is gone."""
        with self._lock:
            for key in [key for key in self._children if key[0] == metric.name]:
                if dict(key[1:]) == labels:
                    del self._children[key]
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

    def _child(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        # The order of the labels is the caller's: two orders are two ways to the same value.
        child = self._children.get((metric.name, *labels.items()))
        return self._new_child(metric, labels) if child is None else child

    def _new_child(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        for label in _BOUNDED_LABELS.intersection(labels):
            labels[label] = self._bounds[label].value(labels[label])
        with self._lock:
            family = self._family(metric)
            child = family.labels(**labels) if metric.labels else family
            self._children[metric.name, *labels.items()] = child
        return child

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
