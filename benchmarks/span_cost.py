"""What telling of a request costs: a span, an event, an attribute, and steps and details that share one.

`python -m benchmarks.span_cost [--output FILE]`

Below a request's span that carries an identity, spans of their own are made and ended, events are added, or
short steps are told of (`Telemetry.step`); it ends with attributes of its own or with details
(`Telemetry.end`); then steps are told of a trace that is not recorded. Each figure is CPU time a part, of the
request's end and of encoding for OTLP as well, less that of a request without parts; the best of several
rounds in one warm process. Beside `benchmarks.tracing_overhead`, which has everything, this has little noise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Span

from benchmarks.stack import write_result
from observability.emit import names
from observability.emit.config import ObservabilityConfig
from observability.emit.provider import OwnRandomIds
from observability.emit.tracing import RemoteSpan, RequestIdentity, Telemetry

_ROUNDS = 15
_REQUESTS = 400
# Of one request. More events than the SDK keeps would be dropped.
_PARTS = 5
_IDENTITY = RequestIdentity("4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "mine", "acme", "standard")


Tell = Callable[[Telemetry, Span, int], None]
_VALUES = {f"millrace.benchmark.{number}": number * 1.5 for number in range(_PARTS)}


def _span(telemetry: Telemetry, request: Span, number: int) -> None:
    telemetry.step(
        names.GATEWAY_ROUTE,
        of=request,
        start_s=1.0,
        end_s=1.0,
        attributes={names.PROMPT_TOKENS: number},
        is_notable=True,
    )


def _event(telemetry: Telemetry, request: Span, number: int) -> None:
    request.add_event(names.GATEWAY_ROUTE, {names.PROMPT_TOKENS: number, "millrace.duration_ms": 0.1}, 1)


def _step(telemetry: Telemetry, request: Span, number: int) -> None:
    telemetry.step(
        names.GATEWAY_ROUTE, of=request, start_s=1.0, end_s=1.0, attributes={names.PROMPT_TOKENS: number}
    )


def _nothing(telemetry: Telemetry, request: Span, number: int) -> None:
    pass


def best_us(
    telemetry: Telemetry,
    exporter: InMemorySpanExporter,
    *,
    flags: str = "01",
    tell: Tell = _nothing,
    attributes: Mapping[str, float] | None = None,
    details: Mapping[str, float] | None = None,
) -> float:
    """CPU microseconds a part, in the best round."""
    parent = RemoteSpan(f"00-{'ab' * 16}-{'cd' * 8}-{flags}", "", _IDENTITY)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        started_s = time.process_time()
        for _ in range(_REQUESTS):
            request = telemetry.start(names.GATEWAY_REQUEST, parent=parent)
            for number in range(_PARTS):
                tell(telemetry, request, number)
            telemetry.end(request, attributes=attributes, details=details)
        encode_spans(exporter.get_finished_spans()).SerializeToString()
        best_s = min(best_s, time.process_time() - started_s)
        exporter.clear()
    return best_s / (_REQUESTS * _PARTS) * 1e6


def main() -> None:
    """Prints the figures, and writes them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    provider = TracerProvider(id_generator=OwnRandomIds())
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry("gateway", ObservabilityConfig(), provider)
    empty_us = best_us(telemetry, exporter)
    figures = {
        name: best_us(telemetry, exporter, tell=tell) - empty_us
        for name, tell in (("span_us", _span), ("event_us", _event), ("step_us", _step))
    }
    figures["attribute_us"] = best_us(telemetry, exporter, attributes=_VALUES) - empty_us
    figures["detail_us"] = best_us(telemetry, exporter, details=_VALUES) - empty_us
    figures["not_recorded_us"] = best_us(telemetry, exporter, flags="00", tell=_step)
    print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    telemetry.shutdown()
    write_result(arguments.output, figures)


if __name__ == "__main__":
    main()
