"""What telling of a request's work costs on its path: a span, a step that is an event, and neither.

`python -m benchmarks.span_cost [--output FILE]`

Below a request's span that carries an identity, a span of its own is made and ended, or a short step is told
of (`Telemetry.step`); then the same for a trace that is not recorded. The best of several rounds in one warm
process; spans go through the batch processor to nowhere. Beside `benchmarks.tracing_overhead`, which has
everything, this has little noise.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from benchmarks.stack import write_result
from observability import names
from observability.config import ObservabilityConfig
from observability.provider import OwnRandomIds
from observability.tracing import RequestIdentity, Telemetry, remote_span

_ROUNDS = 15
_REQUESTS = 400
# Of one request. More events than the SDK keeps would be dropped.
_PARTS = 5
_IDENTITY = RequestIdentity("4bf92f35-77b3-4da6-a3ce-929d0e0e4736", "mine", "acme", "standard")


class _Nowhere(SpanExporter):
    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def best_us(telemetry: Telemetry, *, flags: str, spans: bool) -> float:
    """Microseconds a span or step, in the best round."""
    parent = remote_span(f"00-{'ab' * 16}-{'cd' * 8}-{flags}", "", _IDENTITY)
    best_s = float("inf")
    for _ in range(_ROUNDS):
        spent_s = 0.0
        for _ in range(_REQUESTS):
            request = telemetry.start(names.GATEWAY_REQUEST, parent=parent)
            started_s = time.perf_counter()
            for number in range(_PARTS):
                telemetry.step(
                    names.GATEWAY_ROUTE,
                    of=request,
                    start_s=1.0,
                    end_s=1.0,
                    attributes={names.PROMPT_TOKENS: number},
                    is_notable=spans,
                )
            spent_s += time.perf_counter() - started_s
            telemetry.end(request)
        best_s = min(best_s, spent_s)
        telemetry.flush()
    return best_s / (_REQUESTS * _PARTS) * 1e6


def main() -> None:
    """Prints the figures, and writes them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    arguments = parser.parse_args()
    provider = TracerProvider(id_generator=OwnRandomIds())
    provider.add_span_processor(BatchSpanProcessor(_Nowhere(), max_queue_size=20_000))
    telemetry = Telemetry("gateway", ObservabilityConfig(), provider)
    figures = {
        "span_us": best_us(telemetry, flags="01", spans=True),
        "event_us": best_us(telemetry, flags="01", spans=False),
        "not_recorded_us": best_us(telemetry, flags="00", spans=True),
    }
    print("  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    telemetry.shutdown()
    write_result(arguments.output, figures)


if __name__ == "__main__":
    main()
