"""Where Envoy sends requests: the gateway's two faces, the trace collector, and a JWT issuer's keys."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from urllib.parse import urlsplit

import msgspec

from gateway.settings import Settings
from observability.emit.config import Export
from runtime.addresses import join
from runtime.config import SecurityConfig

_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """TLS to a server that has to prove its name; with a certificate of our own, if it asks for one."""

    name: str
    authority: str
    certificate: str = ""
    key: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoints (host:port) that Envoy balances over. A gateway's are watched, and limited."""

    name: str
    endpoints: tuple[str, ...]
    is_http2: bool = False
    is_gateway: bool = False
    tls: Tls | None = None

    @property
    def is_static(self) -> bool:
        """Whether no endpoint has a name that stands for others."""
        return all(_is_ip(endpoint) for endpoint in self.endpoints)


def clusters(settings: Settings, export: Export | None) -> Iterator[Cluster]:
    """All of one Envoy. `export` is the receiver of spans, which are dropped while it is away."""
    config, gateway, jwt = settings.envoy, settings.gateway, settings.keys.jwt
    grpc = config.gateway_grpc or (gateway.grpc_listen,)
    http = config.gateway_http or (gateway.http_listen,)
    inner = _inner_tls(settings.security)
    # Questions of the edge (rate limits, authorization) have connections and limits of their own, so that
    # running streams of the same processes can neither delay nor crowd them out.
    yield Cluster(name="gateway_edge", endpoints=grpc, is_http2=True, is_gateway=True, tls=inner)
    yield Cluster(name="gateway_edge_http", endpoints=http, is_gateway=True, tls=inner)
    yield Cluster(name="gateway_grpc", endpoints=grpc, is_http2=True, is_gateway=True, tls=inner)
    yield Cluster(name="gateway_http", endpoints=http, is_gateway=True, tls=inner)
    if export is not None:
        over_http = export.protocol == "http/protobuf"
        port = (443 if export.is_secure else 80) if over_http else 4317
        yield _outside("traces", export.url, port, authority=export.certificate, is_http2=not over_http)
    if jwt.jwks_url:
        yield _outside("jwks", jwt.jwks_url, 443 if jwt.jwks_url.startswith("https:") else 80)
    if config.metrics_listen:
        yield Cluster(name="admin", endpoints=(config.admin,))


def _inner_tls(security: SecurityConfig) -> Tls | None:
    if not security.tls_certificate:
        return None
    return Tls(
        name=security.tls_name,
        authority=security.tls_authority,
        certificate=security.tls_certificate,
        key=security.tls_key,
    )


def _outside(
    name: str, url: str, default_port: int, *, authority: str = "", is_http2: bool = False
) -> Cluster:
    """A server that is not ours, which proves its name where its URL says https."""
    parts = urlsplit(url if "://" in url else f"//{url}")
    host = parts.hostname or ""
    tls = Tls(name=host, authority=authority or _AUTHORITIES) if parts.scheme == "https" else None
    return Cluster(name=name, endpoints=(join(host, parts.port or default_port),), is_http2=is_http2, tls=tls)


def _is_ip(host_port: str) -> bool:
    try:
        ipaddress.ip_address(host_port.rpartition(":")[0].strip("[]"))
    except ValueError:
        return False
    return True
