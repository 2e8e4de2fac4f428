"""HTTP filters in the order in which a request meets them: identity, rate, route."""

from __future__ import annotations

from typing import Any

from gateway.auth.authorizer import (
    AUTHORIZE_PREFIX,
    CLAIMS_HEADER,
    CONTENT_TYPE_HEADER,
    COUNTED_HEADER,
    KEY_HEADER,
    QUESTION_HEADER,
    TENANT_HEADER,
)
from gateway.config import EnvoyConfig, JwtConfig
from gateway.envoy import clusters
from gateway.envoy.clusters import typed
from gateway.limits.servicer import CONTENT_TYPE_ENTRY, DOMAIN, KEY_ENTRY, TENANT_ENTRY
from services.context import CONTEXT_HEADER

_FILTERS = "envoy.extensions.filters.http"
_AUTHZ = "envoy.filters.http.ext_authz"
_JWT = "envoy.filters.http.jwt_authn"
_PROVIDER = "issuer"

# Headers of a refusal that the client gets.
_REFUSAL_HEADERS = (
    "content-type",
    "www-authenticate",
    "retry-after",
    "retry-after-ms",
    "grpc-status-details-bin",
)

# Headers that only the edge may set; the last one is Envoy's own.
IDENTITY_HEADERS = (CONTEXT_HEADER, TENANT_HEADER, KEY_HEADER, COUNTED_HEADER, CLAIMS_HEADER)

# Rate limit descriptor. A request that lacks one of its headers has none, and nobody is asked about it: one
# without identity (a public path), and one that no limit of requests per minute applies to.
RATE_LIMITS: list[dict[str, Any]] = [
    {
        "actions": [
            {"request_headers": {"header_name": COUNTED_HEADER, "descriptor_key": "counted"}},
            {"request_headers": {"header_name": TENANT_HEADER, "descriptor_key": TENANT_ENTRY}},
            {"request_headers": {"header_name": KEY_HEADER, "descriptor_key": KEY_ENTRY}},
            {
                "request_headers": {
                    "header_name": "content-type",
                    "descriptor_key": CONTENT_TYPE_ENTRY,
                    "skip_if_absent": True,
                }
            },
        ]
    }
]

# Per-route configuration of what Envoy does not ask about: paths that need no key, and the HTTP face, which
# authenticates its requests itself.
UNASKED_ROUTE: dict[str, Any] = {
    _AUTHZ: typed(f"{_FILTERS}.ext_authz.v3.ExtAuthzPerRoute", disabled=True),
}

# Who called, as dynamic metadata for the log and the spans: of a gRPC call from the request's headers, which
# authorization has added; of an HTTP request from the response's, in which the HTTP face tells it.
IDENTITY_METADATA = "millrace"
TENANT_METADATA = "tenant"
KEY_METADATA = "key_id"


def http_filters(config: EnvoyConfig, jwt: JwtConfig) -> list[dict[str, Any]]:
    """The filter chain."""
    timeout = f"{config.authorization_timeout_ms / 1000:g}s"
    filters = [_jwt_authn(jwt)] if jwt.issuer else []
    return [*filters, _ext_authz(timeout), _ratelimit(timeout), _identity_metadata(), _router()]


def _ext_authz(timeout: str) -> dict[str, Any]:
    return {
        "name": _AUTHZ,
        "typed_config": typed(
            f"{_FILTERS}.ext_authz.v3.ExtAuthz",
            transport_api_version="V3",
            http_service={
                "server_uri": {
                    "uri": f"http://{clusters.GATEWAY_EDGE_HTTP}",
                    "cluster": clusters.GATEWAY_EDGE_HTTP,
                    "timeout": timeout,
                },
                # The client's own path follows, with its slash.
                "path_prefix": AUTHORIZE_PREFIX.rstrip("/"),
                "authorization_request": {"headers_to_add": [{"key": QUESTION_HEADER, "value": "1"}]},
                "authorization_response": {
                    "allowed_upstream_headers": _exactly(*IDENTITY_HEADERS[:-1]),
                    "allowed_client_headers": _exactly(*_REFUSAL_HEADERS),
                },
            },
            failure_mode_allow=False,
            status_on_error={"code": "ServiceUnavailable"},
            # The gateway sees the headers that it decides by, and no others.
            allowed_headers=_exactly(
                "authorization",
                CLAIMS_HEADER,
                CONTENT_TYPE_HEADER,
                "x-request-id",
                "x-client-request-id",
                "traceparent",
                "tracestate",
            ),
        ),
    }


def _exactly(*names: str) -> dict[str, Any]:
    return {"patterns": [{"exact": name} for name in names]}


def _ratelimit(timeout: str) -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.ratelimit",
        "typed_config": typed(
            f"{_FILTERS}.ratelimit.v3.RateLimit",
            domain=DOMAIN,
            timeout=timeout,
            failure_mode_deny=True,
            status_on_error={"code": "ServiceUnavailable"},
            rate_limited_as_resource_exhausted=True,
            disable_x_envoy_ratelimited_header=True,
            rate_limit_service={
                "transport_api_version": "V3",
                "grpc_service": _gateway_service(timeout),
            },
        ),
    }


def _identity_metadata() -> dict[str, Any]:
    def rules(*, remove: bool) -> list[dict[str, Any]]:
        return [
            {
                "header": header,
                "on_header_present": {
                    "metadata_namespace": IDENTITY_METADATA,
                    "key": key,
                    "type": "STRING",
                },
                "remove": remove,
            }
            for header, key in ((TENANT_HEADER, TENANT_METADATA), (KEY_HEADER, KEY_METADATA))
        ]

    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": typed(
            f"{_FILTERS}.header_to_metadata.v3.Config",
            request_rules=rules(remove=False),
            # Clients know who they are.
            response_rules=rules(remove=True),
        ),
    }


def _jwt_authn(jwt: JwtConfig) -> dict[str, Any]:
    if jwt.jwks_file:
        keys: dict[str, Any] = {"local_jwks": {"filename": jwt.jwks_file}}
    else:
        keys = {
            "remote_jwks": {
                "http_uri": {"uri": jwt.jwks_url, "cluster": clusters.JWKS, "timeout": "5s"},
                "cache_duration": f"{jwt.jwks_cache_s}s",
                "async_fetch": {"fast_listener": True},
            }
        }
    provider = {
        "issuer": jwt.issuer,
        "audiences": list(jwt.audiences),
        # Nowhere else: by default a parameter of the query is taken as well, which logs and traces show.
        "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
        # Claims replace the token: nothing behind the edge sees a credential.
        "forward": False,
        "forward_payload_header": CLAIMS_HEADER,
        "pad_forward_payload_header": True,
        **keys,
    }
    return {
        "name": _JWT,
        "typed_config": typed(
            f"{_FILTERS}.jwt_authn.v3.JwtAuthentication",
            providers={_PROVIDER: provider},
            rules=[
                {
                    "match": {"prefix": "/"},
                    # What is no valid token may still be an API key: external authorization decides.
                    "requires": {
                        "requires_any": {
                            "requirements": [
                                {"provider_name": _PROVIDER},
                                {"allow_missing_or_failed": {}},
                            ]
                        }
                    },
                }
            ],
        ),
    }


def _router() -> dict[str, Any]:
    return {
        "name": "envoy.filters.http.router",
        "typed_config": typed(f"{_FILTERS}.router.v3.Router", suppress_envoy_headers=True),
    }


def _gateway_service(timeout: str) -> dict[str, Any]:
    return {"envoy_grpc": {"cluster_name": clusters.GATEWAY_EDGE}, "timeout": timeout}
