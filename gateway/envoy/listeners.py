"""The one port that clients know, for HTTP/1.1, HTTP/2 and gRPC; and the one that Prometheus reads."""

from __future__ import annotations

from typing import Any

from gateway.auth.authorizer import AUTHORIZE_PREFIX, CONTENT_TYPE_HEADER, QUESTION_HEADER
from gateway.config import EnvoyConfig, JwtConfig
from gateway.envoy import clusters
from gateway.envoy.clusters import address, typed
from gateway.envoy.filters import (
    IDENTITY_HEADERS,
    IDENTITY_METADATA,
    KEY_METADATA,
    RATE_LIMITS,
    TENANT_METADATA,
    UNASKED_ROUTE,
    http_filters,
)
from gateway.envoy.replies import local_reply_config
from observability.emit import names
from observability.emit.config import Export
from observability.emit.provider import edge_resource

_HCM = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_MAX_CONTENT_LENGTH = 2**63 - 1
_CLIENT_REQUEST_ID = "x-client-request-id"

# Pages and calls that need no key.
_PUBLIC_PATHS = ("/health", "/openapi.json")
# Pages of the gateway that are not for clients, and the questions of Envoy itself: whoever could ask those
# would be handed a signed context.
_HIDDEN_PATHS = ("/metrics",)
_HIDDEN_PREFIXES = (AUTHORIZE_PREFIX,)
_PUBLIC_PREFIXES = ("/grpc.health.v1.Health/",)
# gRPC services that clients may call, with a key. The gateway's port also serves the rate limits, which
# whoever could ask would spend.
_CLIENT_PREFIXES = (
    "/millrace.inference.v1.InferenceService/",
    "/grpc.reflection.v1.ServerReflection/",
    "/grpc.reflection.v1alpha.ServerReflection/",
)

_ACCESS_LOG_FIELDS = {
    "time": "%START_TIME%",
    "request_id": "%REQ(X-REQUEST-ID)%",
    "client_request_id": f"%REQ({_CLIENT_REQUEST_ID.upper()})%",
    "trace_id": "%TRACE_ID%",
    "tenant": f"%DYNAMIC_METADATA({IDENTITY_METADATA}:{TENANT_METADATA})%",
    "key_id": f"%DYNAMIC_METADATA({IDENTITY_METADATA}:{KEY_METADATA})%",
    "method": "%REQ(:METHOD)%",
    "path": "%REQ(:PATH)%",
    "protocol": "%PROTOCOL%",
    "status": "%RESPONSE_CODE%",
    "grpc_status": "%GRPC_STATUS%",
    "flags": "%RESPONSE_FLAGS%",
    "details": "%RESPONSE_CODE_DETAILS%",
    "bytes_received": "%BYTES_RECEIVED%",
    "bytes_sent": "%BYTES_SENT%",
    "duration_ms": "%DURATION%",
    "first_byte_ms": "%RESPONSE_DURATION%",
    "gateway": "%UPSTREAM_HOST%",
    "client": "%DOWNSTREAM_REMOTE_ADDRESS%",
}


def public_listener(
    config: EnvoyConfig, jwt: JwtConfig, *, max_body_bytes: int, tracing: dict[str, Any] | None
) -> dict[str, Any]:
    """Listener for clients. A stream lasts as long as tokens come; nothing is buffered."""
    manager: dict[str, Any] = {
        "stat_prefix": "ingress",
        "codec_type": "AUTO",
        # The client's address is the peer's, unless proxies in front are declared.
        "use_remote_address": True,
        "xff_num_trusted_hops": config.trusted_hops,
        "generate_request_id": True,
        "always_set_request_id_in_response": True,
        "early_header_mutation_extensions": [_header_mutation()],
        "normalize_path": True,
        "merge_slashes": True,
        "common_http_protocol_options": {
            "idle_timeout": f"{config.idle_timeout_s:g}s",
        },
        "http2_protocol_options": {
            "max_concurrent_streams": config.max_concurrent_streams,
            "initial_stream_window_size": 1024 * 1024,
            "initial_connection_window_size": 4 * 1024 * 1024,
            "connection_keepalive": {"interval": "30s", "timeout": "10s"},
        },
        "request_headers_timeout": f"{config.request_headers_timeout_s:g}s",
        "stream_idle_timeout": f"{config.stream_idle_timeout_s:g}s",
        "drain_timeout": f"{config.drain_time_s}s",
        "delayed_close_timeout": "1s",
        "server_header_transformation": "PASS_THROUGH",
        "local_reply_config": local_reply_config(max_body_bytes),
        "http_filters": http_filters(config, jwt),
        "route_config": _routes(max_body_bytes),
    }
    if config.access_log:
        manager["access_log"] = [_access_log(config.access_log)]
    if tracing is not None:
        manager["tracing"] = tracing
    return {
        "name": "public",
        "address": address(config.listen, "envoy.listen"),
        "per_connection_buffer_limit_bytes": 1024 * 1024,
        "filter_chains": [{"filters": [_manager(manager)]}],
    }


def metrics_listener(config: EnvoyConfig) -> dict[str, Any]:
    """Listener that shows two pages of the admin interface and hides the rest of it."""
    routes = [
        {"match": {"path": "/ready"}, "route": {"cluster": clusters.ADMIN}},
        {
            "match": {"path": "/metrics"},
            "route": {"cluster": clusters.ADMIN, "prefix_rewrite": "/stats/prometheus"},
        },
    ]
    manager = {
        "stat_prefix": "metrics",
        "route_config": {"virtual_hosts": [{"name": "metrics", "domains": ["*"], "routes": routes}]},
        "http_filters": http_filters_without_identity(),
    }
    return {
        "name": "metrics",
        "address": address(config.metrics_listen, "envoy.metrics_listen"),
        "filter_chains": [{"filters": [_manager(manager)]}],
    }


def http_filters_without_identity() -> list[dict[str, Any]]:
    """The router alone."""
    return [
        {
            "name": "envoy.filters.http.router",
            "typed_config": typed("envoy.extensions.filters.http.router.v3.Router"),
        }
    ]


def _manager(fields: dict[str, Any]) -> dict[str, Any]:
    return {"name": "envoy.filters.network.http_connection_manager", "typed_config": typed(_HCM, **fields)}


def _header_mutation() -> dict[str, Any]:
    """Runs before everything else: the client's request id moves aside, identity headers are dropped."""
    client_id = {"key": _CLIENT_REQUEST_ID, "value": "%REQ(X-REQUEST-ID)%"}
    content_type = {"key": CONTENT_TYPE_HEADER, "value": "%REQ(CONTENT-TYPE)%"}
    removed = [*IDENTITY_HEADERS, QUESTION_HEADER, CONTENT_TYPE_HEADER, "x-request-id"]
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": typed(
            "envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            mutations=[
                _overwrite(client_id),
                *({"remove": name} for name in removed),
                _overwrite(content_type),
            ],
        ),
    }


def _overwrite(header: dict[str, str]) -> dict[str, Any]:
    return {"append": {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}}


# A gateway that is gone is found out by the next request, before health checks tell Envoy. A request that
# never left may go to another gateway; whatever may have arrived is not sent twice.
_RETRY: dict[str, Any] = {
    "retry_on": "connect-failure,refused-stream",
    "num_retries": 2,
    "retry_host_predicate": [
        {
            "name": "envoy.retry_host_predicates.previous_hosts",
            "typed_config": typed("envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"),
        }
    ],
    "host_selection_retry_max_attempts": 3,
    "retry_back_off": {"base_interval": "0.005s", "max_interval": "0.05s"},
}


def _routes(max_body_bytes: int) -> dict[str, Any]:
    is_grpc: dict[str, Any] = {"grpc": {}}
    # The bodies are those of the local replies.
    content_length = {
        "name": "content-length",
        "range_match": {"start": max_body_bytes + 1, "end": _MAX_CONTENT_LENGTH},
    }
    too_large = _direct({"prefix": "/", "headers": [content_length]}, 413)
    hidden = [_direct({"path": path}, 404) for path in _HIDDEN_PATHS]
    hidden += [_direct({"prefix": prefix}, 404) for prefix in _HIDDEN_PREFIXES]
    for_clients = [
        _route({"prefix": prefix, **is_grpc}, clusters.GATEWAY_GRPC) for prefix in _CLIENT_PREFIXES
    ]
    public = [
        _route({"path": path}, clusters.GATEWAY_HTTP, typed_per_filter_config=UNASKED_ROUTE)
        for path in _PUBLIC_PATHS
    ]
    public += [
        _route({"prefix": prefix, **is_grpc}, clusters.GATEWAY_GRPC, typed_per_filter_config=UNASKED_ROUTE)
        for prefix in _PUBLIC_PREFIXES
    ]
    return {
        "name": "public",
        "virtual_hosts": [
            {
                "name": "public",
                "domains": ["*"],
                "rate_limits": RATE_LIMITS,
                "routes": [
                    too_large,
                    *hidden,
                    *public,
                    *for_clients,
                    # gRPC reads 404 as UNIMPLEMENTED.
                    _direct({"prefix": "/", **is_grpc}, 404),
                    _route({"prefix": "/"}, clusters.GATEWAY_HTTP, typed_per_filter_config=UNASKED_ROUTE),
                ],
            }
        ],
    }


def _direct(match: dict[str, Any], status: int) -> dict[str, Any]:
    """A route that Envoy answers itself, without asking who calls."""
    return {
        "match": match,
        "direct_response": {"status": status},
        "typed_per_filter_config": UNASKED_ROUTE,
    }


def _route(match: dict[str, Any], cluster: str, **fields: Any) -> dict[str, Any]:
    return {
        "match": match,
        # No limit on the length of an answer; the idle time-out bounds silence. A gRPC caller's own deadline
        # is kept by the gateway, which says so in the status; Envoy would just reset the stream.
        "route": {"cluster": cluster, "timeout": "0s", "retry_policy": _RETRY},
        "decorator": {"operation": str(names.ENVOY_INGRESS), "propagate": False},
        **fields,
    }


def _access_log(path: str) -> dict[str, Any]:
    log_format = {"json_format": _ACCESS_LOG_FIELDS}
    if path == "/dev/stdout":
        message = "envoy.extensions.access_loggers.stream.v3.StdoutAccessLog"
        return {
            "name": "envoy.access_loggers.stdout",
            "typed_config": typed(message, log_format=log_format),
        }
    message = "envoy.extensions.access_loggers.file.v3.FileAccessLog"
    return {
        "name": "envoy.access_loggers.file",
        "typed_config": typed(message, path=path, log_format=log_format),
    }


def traced(config: EnvoyConfig, export: Export, sampled_share: float) -> dict[str, Any]:
    """Spans of requests. Envoy decides which traces are recorded, unless the client has: services follow."""
    headers = {names.REQUEST_ID: "x-request-id", names.CLIENT_REQUEST_ID: _CLIENT_REQUEST_ID}
    metadata = {names.TENANT: TENANT_METADATA, names.KEY_ID: KEY_METADATA}
    tags = [{"tag": str(tag), "request_header": {"name": header}} for tag, header in headers.items()]
    tags += [
        {
            "tag": str(tag),
            "metadata": {
                "kind": {"request": {}},
                "metadata_key": {"key": IDENTITY_METADATA, "path": [{"key": key}]},
            },
        }
        for tag, key in metadata.items()
    ]
    return {
        "provider": {
            "name": "envoy.tracers.opentelemetry",
            "typed_config": typed(
                "envoy.config.trace.v3.OpenTelemetryConfig",
                service_name=names.ENVOY,
                resource_detectors=[
                    {
                        "name": "envoy.tracers.opentelemetry.resource_detectors.static_config",
                        "typed_config": typed(
                            "envoy.extensions.tracers.opentelemetry.resource_detectors.v3."
                            "StaticConfigResourceDetectorConfig",
                            attributes=edge_resource(),
                        ),
                    }
                ],
                sampler=_sampler(config.trace_sampling_percent / 100 * sampled_share),
                **_sender(export),
            ),
        },
        # All go to the sampler: this one would leave out traces that the client wants recorded.
        "random_sampling": {"value": 100.0},
        "custom_tags": tags,
    }


def _sampler(share: float) -> dict[str, Any]:
    """As the client's span is; of requests without one this share."""
    prefix, package = (
        "envoy.tracers.opentelemetry.samplers",
        "envoy.extensions.tracers.opentelemetry.samplers.v3",
    )
    percentage = {"numerator": round(share * 1_000_000), "denominator": "MILLION"}
    by_share = {
        "name": f"{prefix}.trace_id_ratio_based",
        "typed_config": typed(f"{package}.TraceIdRatioBasedSamplerConfig", sampling_percentage=percentage),
    }
    return {
        "name": f"{prefix}.parent_based",
        "typed_config": typed(f"{package}.ParentBasedSamplerConfig", wrapped_sampler=by_share),
    }


def _sender(export: Export) -> dict[str, Any]:
    headers = [{"key": key, "value": value} for key, value in export.headers.items()]
    if export.protocol == "grpc":
        service = {"envoy_grpc": {"cluster_name": clusters.TRACES}, "timeout": "3s"}
        return {"grpc_service": {**service, "initial_metadata": headers}}
    uri = {"uri": export.url, "cluster": clusters.TRACES, "timeout": "3s"}
    added = [{"header": header} for header in headers]
    return {"http_service": {"http_uri": uri, "request_headers_to_add": added}}
