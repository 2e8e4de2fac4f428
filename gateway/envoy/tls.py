"""TLS on the public listener, client certificates where an authority for them is given, and TLS inwards."""

from __future__ import annotations

from typing import Any

from gateway.config import EnvoyConfig
from gateway.envoy.clusters import typed
from services.config import SecurityConfig
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


def upstream_socket(cluster: dict[str, Any], security: SecurityConfig) -> dict[str, Any]:
    """Mutual TLS to the services behind `cluster`, by the protocol that it speaks."""
    (options,) = cluster["typed_extension_protocol_options"].values()
    http2 = "http2_protocol_options" in options["explicit_http_config"]
    return {
        "name": "envoy.transport_sockets.tls",
        "typed_config": typed(
            "envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
            sni=security.tls_name,
            common_tls_context={
                "tls_params": {"tls_minimum_protocol_version": "TLSv1_2"},
                "alpn_protocols": ["h2" if http2 else "http/1.1"],
                "tls_certificates": [
                    {
                        "certificate_chain": {"filename": security.tls_certificate},
                        "private_key": {"filename": security.tls_key},
                    }
                ],
                "validation_context": {
                    "trusted_ca": {"filename": security.tls_authority},
                    "match_typed_subject_alt_names": [
                        {"san_type": "DNS", "matcher": {"exact": security.tls_name}}
                    ],
                },
            },
        ),
    }
