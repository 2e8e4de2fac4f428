"""`[observability]`: what every service does with its traces, metrics and logs, and the local span store.

A variable that OpenTelemetry's specification defines wins over our file. Here they are read for others than
the SDK, since Envoy and the supervisor have to agree with it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal, TypedDict
from urllib.parse import urlsplit

import msgspec
from opentelemetry.util.re import parse_env_headers

from runtime.config import load_section
from runtime.errors import ConfigError

# Semantic conventions for generative AI: the ones frozen at 1.36, the current ones, or both at once.
Semconv = Literal["v1.36", "latest", "both"]

_OPT_IN_VARIABLE = "OTEL_SEMCONV_STABILITY_OPT_IN"
_OPT_IN_LATEST = "gen_ai_latest_experimental"

Protocol = Literal["grpc", "http/protobuf"]
_PROTOCOLS: Mapping[str, Protocol] = {"": "grpc", "grpc": "grpc", "http/protobuf": "http/protobuf"}
# Where the specification sends what is not told where to go.
_DEFAULT_ENDPOINTS: Mapping[Protocol, str] = {
    "grpc": "http://localhost:4317",
    "http/protobuf": "http://localhost:4318",
}
# The path of spans in OTLP over HTTP, below an address that names no path.
_HTTP_PATH = "/v1/traces"
_BATCH = 2048
_HOST = re.compile(r"[\w.:%-]+")
_HEADER_NAME = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """One receiver of spans."""

    # With its scheme, and over HTTP with its path.
    url: str
    protocol: Protocol = "grpc"
    # Whether OTEL_* variables name it: then the exporter of the SDK reads them itself.
    is_standard: bool = False
    # Values of those variables that Envoy's configuration needs.
    headers: Mapping[str, str] = {}
    certificate: str = ""

    @property
    def is_secure(self) -> bool:
        """Whether it is reached over TLS."""
        return self.url.startswith("https://")


class Batching(TypedDict, total=False):
    """Arguments of the SDK's batch processor."""

    max_queue_size: int
    schedule_delay_millis: float
    max_export_batch_size: int


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

    # host:port or URL of an OTLP receiver (collector, Jaeger), unless OTEL_EXPORTER_OTLP_ENDPOINT names one.
    otlp_endpoint: str = ""
    # host:port of a local store that gets every span as well, over gRPC; `millrace serve` sets it.
    store_endpoint: str = ""
    # Share of traces recorded where the caller has not decided already, unless OTEL_TRACES_SAMPLER says it.
    sample_ratio: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 1.0
    # Longest time a finished span waits before it is sent, unless OTEL_BSP_SCHEDULE_DELAY says it.
    export_delay_ms: Annotated[int, msgspec.Meta(ge=10, le=60_000)] = 1_000
    # Spans held while the receiver is slow, unless OTEL_BSP_MAX_QUEUE_SIZE says it; more are dropped.
    max_queued_spans: Annotated[int, msgspec.Meta(ge=100)] = 20_000
    # Prompts and completions on spans, each at most 64 KiB: long texts are cut and say so. Off: traces are
    # read by more people than conversations should be.
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

    def exports(self, environ: Mapping[str, str] = os.environ) -> tuple[Export, ...]:
        """Who gets the spans, the operator's receiver first; nobody when the SDK is disabled."""
        is_disabled = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
        if exporter not in {"", "otlp", "none"}:
            raise ConfigError(f"OTEL_TRACES_EXPORTER: {exporter!r} is not known here; use otlp or none")
        if is_disabled or exporter == "none":
            return ()
        found = []
        protocol = _protocol(environ)
        named = _standard_export(environ) or _own_export(self.otlp_endpoint, protocol, "otlp_endpoint")
        if named is None and exporter:
            named = _standard_export(environ, _DEFAULT_ENDPOINTS[protocol])
        if named is not None:
            found.append(named)
        # The store speaks gRPC alone.
        store = _own_export(self.store_endpoint, "grpc", "store_endpoint")
        if store is not None:
            found.append(store)
        return tuple(found)

    def check(self, environ: Mapping[str, str] = os.environ) -> None:
        """Raises ConfigError for what could not be used, the files that variables name among it."""
        self.sampled_share(environ)
        self.batching(environ)
        if any(export.is_standard and export.is_secure for export in self.exports(environ)):
            for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
                variable, path = _variable(environ, name)
                if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                    raise ConfigError(f"{variable}: {path!r} is no file that can be read")

    def sampled_share(self, environ: Mapping[str, str] = os.environ) -> float:
        """Share of the traces that begin here which are recorded."""
        sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()
        if not sampler:
            return self.sample_ratio
        if sampler.endswith("always_off"):
            return 0.0
        if not sampler.endswith("traceidratio"):
            return 1.0
        text = environ.get("OTEL_TRACES_SAMPLER_ARG", "") or "1"
        try:
            return min(1.0, max(0.0, float(text)))
        except ValueError as error:
            raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: {text!r} is no share between 0 and 1") from error

    def has_own_sampler(self, environ: Mapping[str, str] = os.environ) -> bool:
        """Whether `sample_ratio` decides, as no variable does."""
        return not environ.get("OTEL_TRACES_SAMPLER", "").strip()

    def batching(self, environ: Mapping[str, str] = os.environ) -> Batching:
        """What no OTEL_BSP_* variable says."""
        queued = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
        if queued and not queued.isdecimal():
            raise ConfigError(f"OTEL_BSP_MAX_QUEUE_SIZE: {queued!r} is no number of spans")
        found = Batching()
        if not queued:
            found["max_queue_size"] = self.max_queued_spans
        if not environ.get("OTEL_BSP_SCHEDULE_DELAY"):
            found["schedule_delay_millis"] = self.export_delay_ms
        if not environ.get("OTEL_BSP_MAX_EXPORT_BATCH_SIZE"):
            found["max_export_batch_size"] = min(_BATCH, int(queued or self.max_queued_spans))
        return found


def _protocol(environ: Mapping[str, str]) -> Protocol:
    text = environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "")
    protocol = _PROTOCOLS.get(text.strip())
    if protocol is None:
        raise ConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL: {text!r} is not known; use grpc or http/protobuf")
    return protocol


def _variable(environ: Mapping[str, str], name: str) -> tuple[str, str]:
    """The variable that says it of spans, and its value."""
    own, general = (f"OTEL_EXPORTER_OTLP_{signal}{name}" for signal in ("TRACES_", ""))
    variable = own if environ.get(own, "").strip() else general
    return variable, environ.get(variable, "").strip()


def _standard_export(environ: Mapping[str, str], default: str = "") -> Export | None:
    """The receiver that OTEL_EXPORTER_OTLP_* variables name, else `default`, with what they say of it."""
    variable, endpoint = _variable(environ, "ENDPOINT")
    endpoint = endpoint or default
    if not endpoint:
        return None
    protocol = _protocol(environ)
    if "://" not in endpoint:
        # The exporter adds the scheme by the same rule.
        is_insecure = _variable(environ, "INSECURE")[1].lower() == "true"
        endpoint = f"http{'' if is_insecure else 's'}://{endpoint}"
    _check_url(variable, endpoint)
    if protocol == "http/protobuf" and "_TRACES_" not in variable:
        endpoint = endpoint.rstrip("/") + _HTTP_PATH
    return Export(
        url=endpoint,
        protocol=protocol,
        is_standard=True,
        headers=_headers(environ),
        certificate=_variable(environ, "CERTIFICATE")[1],
    )


def _headers(environ: Mapping[str, str]) -> Mapping[str, str]:
    variable, text = _variable(environ, "HEADERS")
    headers = parse_env_headers(text, liberal=True)
    for name, value in headers.items():
        # The value may be a secret.
        if not _HEADER_NAME.fullmatch(name):
            raise ConfigError(f"{variable}: {name!r} is no name of a header")
        if _CONTROL.search(value):
            raise ConfigError(f"{variable}: the value of {name!r} has control characters")
    return headers


def _own_export(endpoint: str, protocol: Protocol, key: str) -> Export | None:
    if not endpoint:
        return None
    url = endpoint if "://" in endpoint else f"http://{endpoint}"
    _check_url(f"observability.{key}", url)
    if protocol == "http/protobuf" and not urlsplit(url).path.strip("/"):
        url = url.rstrip("/") + _HTTP_PATH
    return Export(url=url, protocol=protocol)


def _check_url(name: str, url: str) -> None:
    with suppress(ValueError):
        parts = urlsplit(url)
        # Its port may be no number, which is a ValueError as well.
        known = parts.scheme in {"http", "https"} and parts.port != 0
        if known and _HOST.fullmatch(parts.hostname or ""):
            return
    raise ConfigError(f"{name}: {url!r} is no URL of a receiver; use http://host:port or https://host:port")


def load(tables: Mapping[str, Any]) -> ObservabilityConfig:
    """`[observability]`; raises ConfigError naming the key or the variable at fault."""
    config = load_section(tables, "observability", ObservabilityConfig)
    config.check()
    return config
