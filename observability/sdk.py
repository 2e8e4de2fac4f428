"""Spans by OpenTelemetry's own SDK instead of our recorder: `observability.exporter = "sdk"`.

For whoever needs what the SDK has and the recorder lacks: the OTEL_* variables of exporters, samplers and
limits, processors of other vendors, libraries that bring their own instrumentation. It costs several times as
much a span.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context

from observability import names
from observability.config import ObservabilityConfig
from services.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, Span, TracerProvider

    from observability.recorder import Inherit


def provider(service: str, config: ObservabilityConfig, inherit: Inherit) -> TracerProvider:
    """A provider that exports to the configured endpoint and writes the request's identity on every span.

    Raises ConfigError where the packages are missing: the images of the services do without them.
    """
    if importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ConfigError(
            'observability.exporter: "sdk" needs opentelemetry-sdk and '
            'opentelemetry-exporter-otlp-proto-grpc; install them, or use "own"'
        )
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    class Identity(SpanProcessor):
        def on_start(self, span: Span, parent_context: Context | None = None) -> None:
            parent = trace.get_current_span(parent_context)
            # Below a span of this process, which has the identity, or the caller's, which brings it.
            above = getattr(parent, "attributes", None) or getattr(parent, "identity", None) or {}
            span.set_attributes({str(key): above[key] for key in names.IDENTITY if key in above})
            span.set_attributes(inherit(parent_context))

        def on_end(self, span: ReadableSpan) -> None:
            """Nothing to do."""

    made = TracerProvider(
        resource=Resource.create({"service.name": service, "service.namespace": "millrace"}),
        sampler=ParentBasedTraceIdRatio(config.sample_ratio),
    )
    made.add_span_processor(Identity())
    endpoint = config.otlp_endpoint
    exporter = OTLPSpanExporter(
        endpoint=endpoint if "://" in endpoint else f"http://{endpoint}",
        insecure=not endpoint.startswith("https://"),
    )
    made.add_span_processor(
        BatchSpanProcessor(
            exporter, max_queue_size=config.max_queued_spans, schedule_delay_millis=config.export_delay_ms
        )
    )
    return made
