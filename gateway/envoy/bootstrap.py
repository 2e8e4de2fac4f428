"""The whole configuration of one Envoy, from the gateway's settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import yaml

from gateway.envoy import clusters, tls
from gateway.envoy.clusters import address, typed
from gateway.envoy.listeners import metrics_listener, public_listener, traced
from gateway.settings import Settings, load_settings
from observability.emit.config import ObservabilityConfig
from services.config import load_section

Profile = Literal["local", "compose", "kubernetes"]

# What differs between the places where Envoy runs; the file's own [envoy] table wins over these.
_CONTAINER = {"listen": "0.0.0.0:8080", "metrics_listen": "0.0.0.0:9902", "admin": "127.0.0.1:9901"}
PROFILES: Mapping[Profile, Mapping[str, Any]] = {
    "local": {},
    "compose": {**_CONTAINER, "gateway_grpc": ["gateway:50051"], "gateway_http": ["gateway:8000"]},
    # Headless service: its name resolves to every gateway pod.
    "kubernetes": {
        **_CONTAINER,
        "gateway_grpc": ["gateway:50051"],
        "gateway_http": ["gateway:8000"],
    },
}

# Spans leave Envoy as soon as those of the services do (default 5 s): a trace is whole when it is asked for.
# And not five at a time (the default), which costs a call each on both sides.
_RUNTIME = {"tracing.opentelemetry.flush_interval_ms": 1000, "tracing.opentelemetry.min_flush_spans": 512}

# Share of the heap limit from which memory is given back, and from which requests are refused.
_SHRINK_AT = 0.92
_REFUSE_AT = 0.97


def render(tables: Mapping[str, Any], profile: Profile = "local") -> str:
    """Envoy's configuration as YAML, from the tables of the configuration file. Raises ConfigError."""
    envoy_table = {**PROFILES[profile], **tables.get("envoy", {})}
    settings = load_settings({**tables, "envoy": envoy_table})
    observability = load_section(tables, "observability", ObservabilityConfig)
    return yaml.safe_dump(build(settings, observability), sort_keys=False, width=120)


def build(settings: Settings, observability: ObservabilityConfig) -> dict[str, Any]:
    """Envoy's bootstrap. Its spans go where the services' go first; if that is nowhere, it makes none."""
    config, gateway, jwt = settings.envoy, settings.gateway, settings.keys.jwt
    export = next(iter(observability.exports()), None)
    tracing = None if export is None else traced(config, export, observability.sampled_share())
    listeners = [public_listener(config, jwt, max_body_bytes=gateway.max_body_bytes, tracing=tracing)]
    if config.tls_certificate or config.tls_key:
        listeners[0]["filter_chains"][0]["transport_socket"] = tls.transport_socket(config)
    upstreams = [
        clusters.gateway_edge(config.gateway_grpc or (gateway.grpc_listen,), config),
        clusters.gateway_edge_http(config.gateway_http or (gateway.http_listen,), config),
        clusters.gateway_grpc(config.gateway_grpc or (gateway.grpc_listen,), config),
        clusters.gateway_http(config.gateway_http or (gateway.http_listen,), config),
    ]
    if settings.security.tls_certificate:
        for cluster in upstreams:
            cluster["transport_socket"] = tls.upstream_socket(cluster, settings.security)
    if export is not None:
        upstreams.append(clusters.traces(export, config))
    if jwt.jwks_url:
        upstreams.append(clusters.jwks(jwt.jwks_url, config))
    if config.metrics_listen:
        listeners.append(metrics_listener(config))
        upstreams.append(clusters.admin(config))
    return {
        "node": {"id": "edge", "cluster": "millrace"},
        "admin": {"address": address(config.admin, "envoy.admin")},
        "static_resources": {"listeners": listeners, "clusters": upstreams},
        "overload_manager": _overload_manager(settings),
        "layered_runtime": {"layers": [{"name": "static", "static_layer": _RUNTIME}]},
    }


def _overload_manager(settings: Settings) -> dict[str, Any]:
    config = settings.envoy
    heap = "envoy.resource_monitors.fixed_heap"
    connections = "envoy.resource_monitors.global_downstream_max_connections"
    return {
        "refresh_interval": "0.25s",
        "resource_monitors": [
            {
                "name": heap,
                "typed_config": typed(
                    "envoy.extensions.resource_monitors.fixed_heap.v3.FixedHeapConfig",
                    max_heap_size_bytes=config.max_heap_bytes,
                ),
            },
            {
                "name": connections,
                "typed_config": typed(
                    "envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig",
                    max_active_downstream_connections=config.max_connections,
                ),
            },
        ],
        "actions": [
            _action("envoy.overload_actions.shrink_heap", heap, _SHRINK_AT),
            _action("envoy.overload_actions.stop_accepting_requests", heap, _REFUSE_AT),
        ],
    }


def _action(name: str, monitor: str, threshold: float) -> dict[str, Any]:
    return {"name": name, "triggers": [{"name": monitor, "threshold": {"value": threshold}}]}
