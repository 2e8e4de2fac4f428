"""OpenTelemetry's SDK as the environment and `[observability]` set it up: who makes and sends the spans."""

from __future__ import annotations

import os
import random
import socket
import time
from importlib import metadata

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from observability.emit import names
from observability.emit.config import Export, ObservabilityConfig
from runtime.errors import ConfigError

# Monotonic seconds, in which the services measure, to Unix nanoseconds, in which spans are written.


def unix_ns(monotonic_s: float) -> int:
    """The moment `monotonic_s` of CLOCK_MONOTONIC (time.monotonic()) in nanoseconds since the Unix epoch.

    CLOCK_MONOTONIC is the same in every process of a machine, so moments may come from another process. The
    clocks' distance is asked each time: it changes when the wall clock is corrected.
    """
    return time.time_ns() - time.monotonic_ns() + round(monotonic_s * 1e9)


class OwnRandomIds(IdGenerator):
    """Ids from a generator of the provider's own, which begins with the system's randomness. The SDK's come
    from Python's global one: an engine that seeds it would repeat them.
    """

    def __init__(self) -> None:
        self._bits = random.Random(os.urandom(32)).getrandbits

    def generate_span_id(self) -> int:
        """64 bits, not all 0."""
        return self._bits(64) or 1

    def generate_trace_id(self) -> int:
        """128 bits, not all 0."""
        return self._bits(128) or 1

    def is_trace_id_random(self) -> bool:
        """All bits are."""
        return True


def make_provider(service: str, config: ObservabilityConfig) -> TracerProvider | None:
    """A provider that sends to everyone who gets the spans; None where nobody does.

    Raises ConfigError for variables and settings that contradict each other.
    """
    config.check()
    exports = config.exports()
    if not exports:
        return None
    share = config.sampled_share()
    provider = TracerProvider(
        resource=_resource(service),
        # None: the SDK reads OTEL_TRACES_SAMPLER.
        sampler=ParentBasedTraceIdRatio(share) if config.has_own_sampler() else None,
        id_generator=OwnRandomIds(),
        # Whoever made it ends it, within a limit of time.
        shutdown_on_exit=False,
    )
    for export in exports:
        try:
            processor = BatchSpanProcessor(_exporter(export), **config.batching())
        except ValueError as error:
            raise ConfigError(f"export of spans to {export.url}: {error}") from error
        provider.add_span_processor(processor)
    return provider


def edge_resource() -> dict[str, str]:
    """What Envoy's spans say of their maker; the process is the one that writes its configuration."""
    return {
        key: str(value)
        for key, value in _resource(names.ENVOY).attributes.items()
        # Envoy has settings of its own for these.
        if key != "service.name" and not key.startswith("telemetry.")
    }


def _resource(service: str) -> Resource:
    """Who makes the spans, over which go OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    own = {
        "service.name": service,
        "service.namespace": "millrace",
        "service.version": metadata.version("millrace"),
        # As engines and gateways name themselves to each other.
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _exporter(export: Export) -> SpanExporter:
    # Each protocol's exporter brings libraries that the other does without.
    if export.protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=None if export.is_standard else export.url)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

    if export.is_standard:
        return grpc.OTLPSpanExporter()
    return grpc.OTLPSpanExporter(endpoint=export.url, insecure=not export.is_secure)
