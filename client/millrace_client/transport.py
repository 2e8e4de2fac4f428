"""Where calls go, over which channel, and with which key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import grpc.aio

# As much as the server takes by default, in bytes: prompts are long.
_MESSAGE_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files in PEM: the authorities that sign the server's certificate (those that gRPC brings where there is
    none), and the certificate and key of this client where the server asks for one.
    """

    authorities: Path | str | None = None
    certificate: Path | str | None = None
    key: Path | str | None = None

    def credentials(self) -> grpc.ChannelCredentials:
        """What a channel is opened with; raises ValueError that names the file at fault."""
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate, key: one is given without the other; give both, or none")
        return grpc.ssl_channel_credentials(
            root_certificates=_read("authorities", self.authorities),
            private_key=_read("key", self.key),
            certificate_chain=_read("certificate", self.certificate),
        )


def _read(field: str, path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{field}: {path} cannot be read: {error.strerror}") from error


def open_channel(url: str, tls: TlsFiles | None) -> grpc.aio.Channel:
    """A channel to `https://host[:port]`, or without TLS to `http://host[:port]` or `host:port`.

    Raises ValueError for anything else.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = 0
    is_bare = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    if parts.scheme not in {"http", "https"} or not parts.hostname or port == 0 or not is_bare:
        raise ValueError(f"url: {url!r} is not https://host:port, http://host:port or host:port")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    options = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ]
    if parts.scheme == "https":
        credentials = (tls or TlsFiles()).credentials()
        return grpc.aio.secure_channel(f"{host}:{port or 443}", credentials, options)
    if tls is not None:
        raise ValueError(
            f"tls: {url!r} is asked without TLS; write https:// before the host, or leave tls out"
        )
    return grpc.aio.insecure_channel(f"{host}:{port or 80}", options)


def key_metadata(api_key: str) -> tuple[tuple[str, str], ...]:
    """What every call carries; raises ValueError for a key that no header can carry."""
    if not api_key or not api_key.isascii() or not api_key.isprintable() or " " in api_key:
        raise ValueError(
            "api_key: it is empty, or has other than visible ASCII characters; give the tenant's key"
        )
    return (("authorization", f"Bearer {api_key}"),)


def checked_timeout(timeout_s: float | None) -> float | None:
    """The same number; raises ValueError unless it is above 0 and finite, or None."""
    if timeout_s is not None and not (timeout_s > 0 and math.isfinite(timeout_s)):
        raise ValueError(
            f"timeout_s: {timeout_s} is not a number of seconds above 0; None waits without a limit"
        )
    return timeout_s
