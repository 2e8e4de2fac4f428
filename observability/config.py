"""`[observability]`: what every service does with its traces, metrics and logs, and the local span store."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from services.config import load_section

# Semantic conventions for generative AI: the ones frozen at 1.36, the current ones, or both at once.
Semconv = Literal["v1.36", "latest", "both"]

_OPT_IN_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
_OPT_IN_LATEST = "gen_ai_latest_experimental"


class ObservabilityConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[observability]`."""

    # Where the local span store listens for OTLP over gRPC, and its database.
    listen: str = "127.0.0.1:4317"
    store: str = ".millrace/traces.sqlite"
    # Prometheus endpoint of the local span store; empty turns it off.
    metrics_listen: str = ""
    # Oldest traces are dropped beyond either limit.
    max_spans: Annotated[int, msgspec.Meta(ge=1_000)] = 500_000
    max_store_bytes: Annotated[int, msgspec.Meta(ge=1_000_000)] = 512 * 1024 * 1024

    # host:port of an OTLP/gRPC receiver (collector, Jaeger or the local store); empty drops all spans.
    otlp_endpoint: str = ""
    # What makes and sends spans: our recorder, or OpenTelemetry's SDK, slower, which knows OTEL_* variables.
    exporter: Literal["own", "sdk"] = "own"
    # Share of traces recorded where the caller has not decided already.
    sample_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    # Longest time a finished span waits before it is sent.
    export_delay_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 1_000
    # Spans held while the receiver is slow; more are dropped, the service is never held up.
    max_queued_spans: Annotated[int, msgspec.Meta(ge=100)] = 20_000
    # Prompts and completions on spans. Off: traces are read by more people than conversations should be.
    capture_content: bool = False
    # Generation of the GenAI attribute names; empty follows OTEL_SEMCONV_STABILITY_OPT_IN.
    semconv: Semconv | Literal[""] = ""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Distinct tenants that get their own label value in metrics; later ones are counted as "other".
    max_tenant_labels: Annotated[int, msgspec.Meta(ge=0)] = 100

    def semconv_generation(self, environ: Mapping[str, str] = os.environ) -> Semconv:
        """The generation to emit: the configured one, else what the standard variable opts into."""
        if self.semconv:
            return self.semconv
        choices = {choice.strip() for choice in environ.get(_OPT_IN_VARIABLE, "").split(",")}
        return "latest" if _OPT_IN_LATEST in choices else "v1.36"


def load(tables: Mapping[str, Any]) -> ObservabilityConfig:
    """`[observability]`; raises ConfigError naming the key at fault."""
    return load_section(tables, "observability", ObservabilityConfig)
