"""What one span costs on the path of a request: ours, one that is not recorded, and OpenTelemetry's SDK's.

`python -m benchmarks.span_cost [--output FILE]`

A span is started below a request's span, gets an attribute and ends; the request carries an identity. The
best of several rounds in one warm process, exports not included: beside `benchmarks.tracing_overhead`, which
has everything, this has little noise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.stack import write_result
from observability import names, tracing
from observability.config import ObservabilityConfig
from observability.recorder import SpanRecorder
from observability.tracing import RequestIdentity, Telemetry, remote_span

_ROUNDS = 15
_SPANS = 2000
_IDENTITY = RequestIdentity("4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "mine", "acme", "standard")


class _Nowhere(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def best_us(telemetry: Telemetry, *, flags: str) -> float:
    """Microseconds a span, in the best round."""
    parent = remote_span(f"00-{'ab' * 16}-{'cd' * 8}-{flags}", "", _IDENTITY)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        request = telemetry.start(names.GATEWAY_REQUEST, parent=parent)
        started_s = time.perf_counter()
        for number in range(_SPANS):
            span = telemetry.start(names.GATEWAY_ROUTE, parent=request)
            span.set_attribute(names.PROMPT_TOKENS, number)
            telemetry.end(span)
        best_s = min(best_s, time.perf_counter() - started_s)
        telemetry.end(request)
        telemetry.flush()
    return best_s / _SPANS * 1e6


def main() -> None:
    """Prints the figures, and writes them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    recorder = SpanRecorder(lambda spans, timeout_s: True, tracing.identity_attributes, delay_s=60.0)
    ours = Telemetry("gateway", ObservabilityConfig(), recorder)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere(), max_queue_size=20_000))
    sdk = Telemetry("gateway", ObservabilityConfig(), provider)
    figures = {
        "recorded_us": best_us(ours, flags="01"),
        "not_recorded_us": best_us(ours, flags="00"),
        "sdk_us": best_us(sdk, flags="01"),
    }
    print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    ours.shutdown()
    sdk.shutdown()
    write_result(arguments.output, figures)


if __name__ == "__main__":
    main()
