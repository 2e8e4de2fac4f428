"""The whole configuration of one Envoy, from the gateway's settings: `envoy.yaml.j2` with its values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from gateway.auth import authorizer
from gateway.config import EnvoyConfig
from gateway.envoy.clusters import clusters
from gateway.envoy.replies import DOCUMENTS, local_reply_config
from gateway.faces.error_forms import ERROR_FORMS
from gateway.intake.refusals import LIMIT_S
from gateway.limits import servicer
from gateway.settings import Settings, load_settings, split_address
from gateway.types.error_form import ErrorForms
from gateway.ui.files import PREFIX as UI_PREFIX
from observability.emit import names
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import edge_resource
from runtime.config import load_section
from runtime.context import CONTEXT_HEADER
from runtime.errors import ConfigError

Profile = Literal["local", "compose", "kubernetes"]

# Settings of Envoy by where it runs; the file's own [envoy] table wins over these.
_CONTAINER = {
    "listen": "0.0.0.0:8080",
    "metrics_listen": "0.0.0.0:9902",
    "admin": "127.0.0.1:9901",
    # In Kubernetes a headless service, whose name resolves to every gateway pod.
    "gateway_grpc": ["gateway:50051"],
    "gateway_http": ["gateway:8000"],
}
PROFILES: Mapping[Profile, Mapping[str, Any]] = {"local": {}, "compose": _CONTAINER, "kubernetes": _CONTAINER}

# Headers that authorization adds to a request, for the services behind and for Envoy's own filters.
_CONTEXT_HEADERS = (
    CONTEXT_HEADER,
    authorizer.TENANT_HEADER,
    authorizer.KEY_HEADER,
    authorizer.COUNTED_HEADER,
)
# Inside Envoy alone: protocol and transfer coding of a request.
_FRAMING_HEADER = "x-millrace-framing"
# Headers that only the edge may set; the last one is Envoy's own.
IDENTITY_HEADERS = (*_CONTEXT_HEADERS, authorizer.CLAIMS_HEADER)


def render(tables: Mapping[str, Any], profile: Profile = "local") -> str:
    """Envoy's configuration as YAML, from the tables of the configuration file. Raises ConfigError."""
    envoy_table = {**PROFILES[profile], **tables.get("envoy", {})}
    settings = load_settings({**tables, "envoy": envoy_table})
    observability = load_section(tables, "observability", ObservabilityConfig)
    return yaml.safe_dump(build(settings, observability), sort_keys=False, width=120)


def build(
    settings: Settings, observability: ObservabilityConfig, error_forms: ErrorForms = ERROR_FORMS
) -> dict[str, Any]:
    """Envoy's bootstrap. Its spans go where the services' go first; if that is nowhere, it makes none."""
    config, gateway = settings.envoy, settings.gateway
    _check_tls(config)
    export = next(iter(observability.exports()), None)
    share = config.trace_sampling_percent / 100 * observability.sampled_share()
    text = _TEMPLATES.get_template("envoy.yaml.j2").render(
        config=config,
        jwt=settings.keys.jwt,
        clusters=list(clusters(settings, export)),
        max_body_bytes=gateway.max_body_bytes,
        has_uploads=bool(gateway.batches.directory),
        allowed_origin=_one_of(config.cors_origins),
        # Whether an answer of Envoy's own is for a page that may read it.
        from_pages=[True, False] if config.cors_origins else [False],
        edge_timeout=f"{config.authorization_timeout_ms / 1000:g}s",
        # A refusal may wait so long for its throttle (intake.refusals).
        count_timeout=f"{config.authorization_timeout_ms / 1000 + LIMIT_S:g}s",
        local_reply_config=local_reply_config(gateway.max_body_bytes, error_forms),
        export=export,
        export_headers=[{"key": key, "value": value} for key, value in export.headers.items()]
        if export is not None
        else [],
        share_sampler=_share_sampler(share),
    )
    built: dict[str, Any] = yaml.safe_load(text)
    return built


def _share_sampler(share: float) -> dict[str, Any]:
    return {
        "name": "envoy.tracers.opentelemetry.samplers.trace_id_ratio_based",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.tracers.opentelemetry.samplers.v3"
            ".TraceIdRatioBasedSamplerConfig",
            "sampling_percentage": {"numerator": round(share * 1_000_000), "denominator": "MILLION"},
        },
    }


def _check_tls(config: EnvoyConfig) -> None:
    if bool(config.tls_certificate) != bool(config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        raise ConfigError(f"envoy.{missing}: TLS needs a certificate and its key; set both or neither")


def _address(host_port: str, key: str = "address") -> dict[str, Any]:
    """Envoy's form of host:port."""
    host, port = split_address(key, host_port)
    return {"socket_address": {"address": host, "port_value": port}}


def _seconds(value: float) -> str:
    return f"{value:g}s"


def _exactly(headers: Iterable[str]) -> list[dict[str, str]]:
    return [{"exact": header} for header in headers]


def _one_of(origins: Iterable[str]) -> dict[str, Any]:
    """What matches any of the origins; "*" is every one."""
    either = "|".join(".*" if origin == "*" else re.escape(origin) for origin in origins)
    return {"safe_regex": {"regex": either}}


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# Values are written into the template as JSON, so that no text can end its field.
_TEMPLATES = Environment(
    loader=PackageLoader("gateway.envoy", "."),
    finalize=_json,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters.update(seconds=_seconds, exactly=_exactly)
_TEMPLATES.globals.update(
    address=_address,
    http_connection_manager="type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
    ".HttpConnectionManager",
    local_rate_limit="type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit",
    context_headers=_CONTEXT_HEADERS,
    dropped_headers=(
        *IDENTITY_HEADERS,
        authorizer.QUESTION_HEADER,
        authorizer.CONTENT_TYPE_HEADER,
        _FRAMING_HEADER,
        "x-request-id",
    ),
    framing_header=_FRAMING_HEADER,
    tenant_header=authorizer.TENANT_HEADER,
    key_header=authorizer.KEY_HEADER,
    counted_header=authorizer.COUNTED_HEADER,
    claims_header=authorizer.CLAIMS_HEADER,
    content_type_header=authorizer.CONTENT_TYPE_HEADER,
    question_header=authorizer.QUESTION_HEADER,
    credentials_headers=authorizer.CREDENTIALS_HEADERS,
    authorize_prefix=authorizer.AUTHORIZE_PREFIX,
    documents=DOCUMENTS,
    ui_prefix=UI_PREFIX,
    rate_limit_domain=servicer.DOMAIN,
    tenant_entry=servicer.TENANT_ENTRY,
    key_entry=servicer.KEY_ENTRY,
    path_entry=servicer.PATH_ENTRY,
    content_type_entry=servicer.CONTENT_TYPE_ENTRY,
    service_name=names.ENVOY,
    ingress_span=str(names.ENVOY_INGRESS),
    tags={
        "request_id": str(names.REQUEST_ID),
        "client_request_id": str(names.CLIENT_REQUEST_ID),
        "tenant": str(names.TENANT),
        "key_id": str(names.KEY_ID),
    },
    edge_resource=edge_resource,
)
