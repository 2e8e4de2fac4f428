"""Envoy's rate limit service: gRPC calls per minute, counted before they reach their face."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from envoy_api.config.core.v3 import base_pb2
from envoy_api.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

from contract.errors import MillraceError, Reason
from gateway.limits.counter import RequestCounter, exceeded_headers
from gateway.types.error_form import ErrorForm, ErrorForms

# Keys of the descriptor that Envoy is configured to send.
TENANT_ENTRY = "tenant"
KEY_ENTRY = "key"
PATH_ENTRY = "path"
CONTENT_TYPE_ENTRY = "content_type"
DOMAIN = "millrace"

_OK = rls_pb2.RateLimitResponse.OK
_OVER = rls_pb2.RateLimitResponse.OVER_LIMIT
_MINUTE = rls_pb2.RateLimitResponse.RateLimit.MINUTE


class RateLimitServicer(rls_pb2_grpc.RateLimitServiceServicer):
    """Counts a request per call. Over the limit, the answer holds the body and headers that clients get.

    When requests cannot be counted and the policy is to refuse, the call fails and Envoy answers 503.
    """

    def __init__(
        self, counter: RequestCounter, turn: Callable[[str], Awaitable[None]], error_forms: ErrorForms
    ) -> None:
        """`turn` is waited for, with the tenant, before a refusal is sent."""
        self._counter = counter
        self._turn = turn
        self._error_forms = error_forms

    async def ShouldRateLimit(
        self, request: rls_pb2.RateLimitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> rls_pb2.RateLimitResponse:
        """Decides about one request by the tenant and key in its descriptor."""
        entries = {entry.key: entry.value for item in request.descriptors for entry in item.entries}
        tenant = entries.get(TENANT_ENTRY, "")
        try:
            headers = await self._counter.count(tenant, entries.get(KEY_ENTRY, ""))
        except MillraceError as error:
            if error.reason is not Reason.REQUEST_RATE_EXCEEDED:
                raise
            await self._turn(tenant)
            path, content_type = entries.get(PATH_ENTRY, ""), entries.get(CONTENT_TYPE_ENTRY, "")
            return _over(error, self._error_forms.of(path, content_type))
        return rls_pb2.RateLimitResponse(overall_code=_OK, response_headers_to_add=_headers(headers))


def _over(error: MillraceError, form: ErrorForm) -> rls_pb2.RateLimitResponse:
    limit = rls_pb2.RateLimitResponse.RateLimit(
        requests_per_unit=int(error.metadata["limit"]), unit=_MINUTE, name=error.metadata["scope"]
    )
    return rls_pb2.RateLimitResponse(
        overall_code=_OVER,
        statuses=[rls_pb2.RateLimitResponse.DescriptorStatus(code=_OVER, current_limit=limit)],
        response_headers_to_add=_headers({**form.headers(error), **exceeded_headers(error)}),
        raw_body=form.body(error),
    )


def _headers(headers: dict[str, str]) -> list[base_pb2.HeaderValue]:
    return [base_pb2.HeaderValue(key=key, value=value) for key, value in headers.items()]
