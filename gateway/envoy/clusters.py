"""Where Envoy sends requests: the gateway's two faces, the trace collector, and a JWT issuer's keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from gateway.config import EnvoyConfig
from gateway.settings import split_address
from observability.emit.config import Export
from services.addresses import join

GATEWAY_GRPC = "gateway_grpc"
# The same processes: questions of the edge have connections and limits of their own, so that running streams
# can neither delay nor crowd them out.
GATEWAY_EDGE = "gateway_edge"
GATEWAY_EDGE_HTTP = "gateway_edge_http"
GATEWAY_HTTP = "gateway_http"
TRACES = "traces"
JWKS = "jwks"
ADMIN = "admin"

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_CHECK_INTERVAL = "1s"


def typed(name: str, **fields: Any) -> dict[str, Any]:
    """A typed_config of an Envoy message."""
    return {"@type": f"type.googleapis.com/{name}", **fields}


def address(host_port: str, key: str = "address") -> dict[str, Any]:
    """Envoy's form of host:port."""
    host, port = split_address(key, host_port)
    return {"socket_address": {"address": host, "port_value": port}}


def gateway_grpc(endpoints: Sequence[str], config: EnvoyConfig) -> dict[str, Any]:
    """gRPC face."""
    return _gateway(GATEWAY_GRPC, endpoints, config, {"grpc_health_check": {}}, http2=True)


def gateway_edge(endpoints: Sequence[str], config: EnvoyConfig) -> dict[str, Any]:
    """Rate limit service."""
    return _gateway(GATEWAY_EDGE, endpoints, config, {"grpc_health_check": {}}, http2=True)


def gateway_edge_http(endpoints: Sequence[str], config: EnvoyConfig) -> dict[str, Any]:
    """Authorization."""
    check = {"http_health_check": {"path": "/health"}}
    return _gateway(GATEWAY_EDGE_HTTP, endpoints, config, check, http2=False)


def gateway_http(endpoints: Sequence[str], config: EnvoyConfig) -> dict[str, Any]:
    """HTTP face."""
    return _gateway(GATEWAY_HTTP, endpoints, config, {"http_health_check": {"path": "/health"}}, http2=False)


def traces(export: Export, config: EnvoyConfig) -> dict[str, Any]:
    """Receiver of spans; they are dropped while it is away."""
    over_http = export.protocol == "http/protobuf"
    port = (443 if export.is_secure else 80) if over_http else 4317
    cluster = _cluster(TRACES, [_host_port(export.url, port)], config, http2=not over_http)
    if export.is_secure:
        cluster["transport_socket"] = _verified(export.url, export.certificate or _AUTHORITIES)
    return cluster


def jwks(url: str, config: EnvoyConfig) -> dict[str, Any]:
    """Server of an issuer's keys."""
    secure = urlsplit(url).scheme == "https"
    cluster = _cluster(JWKS, [_host_port(url, 443 if secure else 80)], config, http2=False)
    if secure:
        cluster["transport_socket"] = _verified(url, _AUTHORITIES)
    return cluster


def _verified(url: str, authorities: str) -> dict[str, Any]:
    """TLS to a server that has to prove its name."""
    host = urlsplit(url).hostname
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            sni=host,
            common_tls_context={
                "validation_context": {
                    "trusted_ca": {"filename": authorities},
                    "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": host}}],
                }
            },
        ),
    }


def admin(config: EnvoyConfig) -> dict[str, Any]:
    """Envoy's own admin interface, of which the metrics listener shows two pages."""
    return _cluster(ADMIN, [config.admin], config, http2=False)


def _gateway(
    name: str, endpoints: Sequence[str], config: EnvoyConfig, check: dict[str, Any], *, http2: bool
) -> dict[str, Any]:
    return {
        **_cluster(name, endpoints, config, http2=http2),
        "lb_policy": "LEAST_REQUEST",
        # A gateway that is not healthy gets nothing, even when none is: the client is told at once.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [
            {
                "timeout": _CHECK_INTERVAL,
                "interval": _CHECK_INTERVAL,
                "no_traffic_interval": _CHECK_INTERVAL,
                "unhealthy_interval": "0.25s",
                "no_traffic_healthy_interval": _CHECK_INTERVAL,
                "unhealthy_threshold": 2,
                "healthy_threshold": 1,
                **check,
            }
        ],
        "circuit_breakers": {
            "thresholds": [
                {
                    "max_connections": config.max_connections,
                    "max_requests": config.max_requests,
                    "max_pending_requests": config.max_requests,
                    "track_remaining": True,
                }
            ]
        },
    }


def _cluster(name: str, endpoints: Sequence[str], config: EnvoyConfig, *, http2: bool) -> dict[str, Any]:
    # A name may stand for several processes (a headless service): every address of it is an endpoint.
    static = all(_is_ip(endpoint) for endpoint in endpoints)
    protocol: dict[str, Any] = {"http_protocol_options": {}}
    if http2:
        # A dead peer is noticed by pings, not by the next request that waits for it.
        keepalive = {"interval": "10s", "timeout": "5s"}
        protocol = {"http2_protocol_options": {"connection_keepalive": keepalive}}
    return {
        "name": name,
        **({"type": "STATIC"} if static else {"cluster_type": _every_address()}),
        "connect_timeout": f"{config.connect_timeout_s:g}s",
        "typed_extension_protocol_options": {
            _HTTP_OPTIONS: typed(_HTTP_OPTIONS, explicit_http_config=protocol)
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": address(endpoint)}} for endpoint in endpoints]}
            ],
        },
    }


def _every_address() -> dict[str, Any]:
    """Discovery by DNS in which each address of a name is an endpoint."""
    message = "envoy.extensions.clusters.dns.v3.DnsCluster"
    return {"name": "envoy.cluster.dns", "typed_config": typed(message, dns_refresh_rate="2s")}


def _is_ip(host_port: str) -> bool:
    try:
        ipaddress.ip_address(host_port.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True


def _host_port(endpoint: str, default_port: int) -> str:
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    return join(parts.hostname or "", parts.port or default_port)
