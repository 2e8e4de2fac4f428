"""Envoy's external authorization: credentials to a signed request context, before anything else is spent."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from typing import Any

import grpc
import msgspec
from envoy_api.config.core.v3 import base_pb2
from envoy_api.service.auth.v3 import external_auth_pb2, external_auth_pb2_grpc
from envoy_api.type.v3 import http_status_pb2
from google.rpc import code_pb2, status_pb2
from millrace.common.v1 import context_pb2
from opentelemetry.util.types import AttributeValue

from gateway.auth.convert import write_tier
from gateway.auth.directory import KeyDirectory, Principal
from gateway.openai_error import error_body, error_headers
from gateway.tiers import Tiers
from observability import names
from observability.metrics import Metrics
from observability.tracing import Telemetry
from services.context import CONTEXT_HEADER, sign, to_header
from services.errors import MillraceError, Reason
from services.status import to_status

TENANT_HEADER = "x-millrace-tenant"
KEY_HEADER = "x-millrace-key"
# Set when a limit of requests per minute applies; without it Envoy does not ask the rate limit service.
COUNTED_HEADER = "x-millrace-counted"
# Claims of a token that Envoy's jwt_authn filter has verified: JSON in base64url.
CLAIMS_HEADER = "x-millrace-jwt-claims"
_SCHEME = "bearer "
_OVERWRITE = base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_OK = status_pb2.Status(code=code_pb2.OK)
_decode_claims = msgspec.json.Decoder(dict[str, Any]).decode


class AuthorizationServicer(external_auth_pb2_grpc.AuthorizationServicer):
    """Answers each Check with a signed context, or with the refusal as the client will read it.

    HTTP clients get OpenAI's error body. gRPC clients get the status that Envoy derives from the HTTP one
    (401 UNAUTHENTICATED, 403 PERMISSION_DENIED) with the message, and the rich status in its trailer.
    """

    def __init__(
        self,
        directory: KeyDirectory,
        tiers: Tiers,
        secret: bytes,
        telemetry: Telemetry,
        metrics: Metrics,
    ) -> None:
        self._directory = directory
        self._tiers = tiers
        self._secret = secret
        self._telemetry = telemetry
        self._metrics = metrics

    async def Check(
        self, request: external_auth_pb2.CheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> external_auth_pb2.CheckResponse:
        """Authenticates one request by its headers."""
        started_s = time.perf_counter()
        headers = request.attributes.request.http.headers
        attributes: dict[str, AttributeValue] = {names.REQUEST_ID: headers.get("x-request-id", "")}
        span = self._telemetry.start(names.GATEWAY_AUTHORIZE, attributes=attributes)
        try:
            principal = self._authenticate(headers)
        except MillraceError as error:
            self._telemetry.end(
                span, attributes={names.OUTCOME: error.reason.value}, error=error.reason.value
            )
            self._metrics.add(names.REJECTIONS, reason=error.reason.value, tier="")
            return refused(error, is_grpc=is_grpc(headers.get("content-type", "")))
        else:
            self._telemetry.end(
                span,
                attributes={
                    names.TENANT: principal.tenant,
                    names.KEY_ID: principal.key_id,
                    names.TIER: principal.tier,
                },
            )
            return self._allowed(principal, headers)
        finally:
            self._metrics.observe(names.AUTHORIZE_SECONDS, time.perf_counter() - started_s)

    def _authenticate(self, headers: Mapping[str, str]) -> Principal:
        claims = headers.get(CLAIMS_HEADER, "")
        if claims:
            return self._directory.principal_of_claims(_claims(claims))
        credentials = headers.get("authorization", "")
        if not credentials:
            raise MillraceError(
                Reason.MISSING_CREDENTIALS,
                "no API key was sent; send the header `authorization: Bearer <key>`",
            )
        if credentials[: len(_SCHEME)].lower() != _SCHEME:
            raise MillraceError(
                Reason.INVALID_CREDENTIALS,
                "the authorization header has another scheme than Bearer; send `authorization: Bearer <key>`",
            )
        return self._directory.authenticate(credentials[len(_SCHEME) :].strip())

    def _allowed(self, principal: Principal, headers: Mapping[str, str]) -> external_auth_pb2.CheckResponse:
        signed = sign(self._context(principal, headers), self._secret)
        added = [
            _header(CONTEXT_HEADER, to_header(signed)),
            _header(TENANT_HEADER, principal.tenant),
            _header(KEY_HEADER, principal.key_id),
        ]
        if self._is_counted(principal):
            added.append(_header(COUNTED_HEADER, "1"))
        return external_auth_pb2.CheckResponse(
            status=_OK,
            ok_response=external_auth_pb2.OkHttpResponse(
                headers=added,
                headers_to_remove=["authorization", CLAIMS_HEADER],
            ),
        )

    def _is_counted(self, principal: Principal) -> bool:
        limits = (
            self._directory.tenant_limits(principal.tenant),
            self._directory.key_limits(principal.key_id),
        )
        return any(limit.requests_per_minute is not None for limit in limits)

    def _context(self, principal: Principal, headers: Mapping[str, str]) -> context_pb2.RequestContext:
        context = context_pb2.RequestContext(
            request_id=headers.get("x-request-id", ""),
            tenant=principal.tenant,
            key_id=principal.key_id,
            cache_salt=principal.cache_salt,
            allowed_models=principal.allowed_models,
            traceparent=headers.get("traceparent", ""),
            tracestate=headers.get("tracestate", ""),
            issued_unix_ms=time.time_ns() // 1_000_000,
        )
        write_tier(context, self._tiers.named(principal.tier), tenant_weight=principal.tenant_weight)
        return context


def is_grpc(content_type: str) -> bool:
    """Whether a request with this content type is answered in gRPC's form."""
    return content_type.startswith("application/grpc")


def refused(error: MillraceError, *, is_grpc: bool) -> external_auth_pb2.CheckResponse:
    """The refusal as Envoy passes it to the client."""
    denied = external_auth_pb2.DeniedHttpResponse(
        status=http_status_pb2.HttpStatus(code=error.mapping.http_status),
        headers=[_header(key, value) for key, value in refusal_headers(error, is_grpc=is_grpc).items()],
        body=error.message if is_grpc else error_body(error).decode(),
    )
    return external_auth_pb2.CheckResponse(
        status=status_pb2.Status(code=error.mapping.grpc_code.value[0], message=error.message),
        denied_response=denied,
    )


def refusal_headers(error: MillraceError, *, is_grpc: bool) -> dict[str, str]:
    """Headers of a refusal that Envoy sends on behalf of the gateway."""
    headers = error_headers(error)
    if is_grpc:
        rich = base64.b64encode(to_status(error).SerializeToString()).decode()
        headers["grpc-status-details-bin"] = rich.rstrip("=")
    else:
        headers["content-type"] = "application/json"
        if error.mapping.http_status == 401:
            headers["www-authenticate"] = "Bearer"
    return headers


def _header(key: str, value: str) -> base_pb2.HeaderValueOption:
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=key, value=value), append_action=_OVERWRITE
    )


def _claims(text: str) -> dict[str, Any]:
    try:
        return _decode_claims(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise MillraceError(
            Reason.INVALID_CREDENTIALS, "the verified token's claims cannot be read as JSON"
        ) from error
