"""Mutual TLS between the services: who has no certificate of the deployment's own authority is not heard.

Certificates are for services, not for hosts: a name in front of several pods resolves to addresses that come
and go, so each certificate carries the one name of `[security] tls_name`, which every client asks for.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from runtime.config import SecurityConfig
from runtime.errors import ConfigError


@dataclass(frozen=True)
class InternalTls:
    """Certificate, key and authority in PEM, with the files that they come from."""

    security: SecurityConfig
    certificate: bytes
    key: bytes
    authority: bytes

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """For a client of another service."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        """The name that the other service's certificate must have."""
        return (("grpc.ssl_target_name_override", self.security.tls_name),)

    def server_credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server; clients without a certificate of the authority fail at the handshake."""
        return grpc.ssl_server_credentials(
            [(self.key, self.certificate)], self.authority, require_client_auth=True
        )

    def server_context(self) -> ssl.SSLContext:
        """The same for a server of HTTP/1.1 whose connections the event loop keeps."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.security.tls_certificate, self.security.tls_key)
        context.load_verify_locations(self.security.tls_authority)
        context.set_alpn_protocols(["http/1.1"])
        context.verify_mode = ssl.CERT_REQUIRED
        return context


_current: InternalTls | None = None


def use(security: SecurityConfig) -> InternalTls | None:
    """Has every channel and server of this process speak TLS, if the table names certificates.

    Once a process, before the first of them. Raises ConfigError for files that are missing or do not fit.
    """
    global _current  # noqa: PLW0603
    _current = load(security)
    return _current


def current() -> InternalTls | None:
    """What `use` was given; None where services speak without TLS."""
    return _current


def load(security: SecurityConfig) -> InternalTls | None:
    """Reads the files; None when none is named. Raises ConfigError for half a set and for unusable ones."""
    names = ("tls_certificate", "tls_key", "tls_authority")
    paths = {name: getattr(security, name) for name in names}
    if not any(paths.values()):
        return None
    for name, path in paths.items():
        if not path:
            raise ConfigError(
                f"security.{name}: TLS between services needs a certificate, its key and the authority of "
                "both sides; set all three (make certificates) or none"
            )
    pem: dict[str, bytes] = {}
    for name, path in paths.items():
        try:
            pem[name] = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"security.{name}: {error}") from error
    found = InternalTls(security, pem["tls_certificate"], pem["tls_key"], pem["tls_authority"])
    try:
        found.server_context()
    except (ssl.SSLError, OSError) as error:
        # gRPC would only say that something did not work.
        raise ConfigError(
            f"security.tls_certificate: {paths['tls_certificate']} with tls_key and tls_authority cannot be "
            f"used: {error}; they must be PEM files, and the key that of the certificate"
        ) from error
    return found
