"""TLS on the public listener, and client certificates where an authority for them is given."""

from __future__ import annotations

from typing import Any

from gateway.config import EnvoyConfig
from gateway.envoy.clusters import typed
from services.errors import ConfigError


def transport_socket(config: EnvoyConfig) -> dict[str, Any]:
    """TLS 1.2 and above for HTTP/1.1 and HTTP/2 over ALPN; raises ConfigError for half a pair of files."""
    if not (config.tls_certificate and config.tls_key):
        missing = "tls_key" if config.tls_certificate else "tls_certificate"
        raise ConfigError(f"envoy.{missing}: TLS needs a certificate and its key; set both or neither")
    common: dict[str, Any] = {
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
        "alpn_protocols": ["h2", "http/1.1"],
        "tls_certificates": [
            {
                "certificate_chain": {"filename": config.tls_certificate},
                "private_key": {"filename": config.tls_key},
            }
        ],
    }
    if config.tls_client_ca:
        common["validation_context"] = {"trusted_ca": {"filename": config.tls_client_ca}}
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(
            "envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
            common_tls_context=common,
            require_client_certificate=bool(config.tls_client_ca),
        ),
    }
