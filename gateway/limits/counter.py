"""Requests per minute as both faces count them: with a span, and with what refusals tell."""

from __future__ import annotations

from gateway.limits.requests import RequestLimiter
from observability import names
from observability.metrics import Metrics
from observability.tracing import Parent, Telemetry
from services.errors import MillraceError, Reason


class RequestCounter:
    """Counts requests of callers to whom a limit applies, once each."""

    def __init__(self, limiter: RequestLimiter, telemetry: Telemetry, metrics: Metrics) -> None:
        self._limiter = limiter
        self._telemetry = telemetry
        self._metrics = metrics

    async def count(self, tenant: str, key_id: str, parent: Parent = None) -> dict[str, str]:
        """See RequestLimiter.admit; `parent` is that of the span, by default the current one."""
        with self._telemetry.span(
            names.GATEWAY_RATE_LIMIT,
            parent=parent,
            attributes={names.TENANT: tenant, names.KEY_ID: key_id},
        ) as span:
            try:
                return await self._limiter.admit(tenant, key_id)
            except MillraceError as error:
                span.set_attribute(names.OUTCOME, error.reason.value)
                if error.retry_after_s is not None:
                    span.set_attribute(names.RETRY_AFTER_S, error.retry_after_s)
                self._metrics.add(names.REJECTIONS, reason=error.reason.value, tier="")
                raise


def exceeded_headers(error: MillraceError) -> dict[str, str]:
    """What a refusal says of the limit in its headers; nothing if it is not about one."""
    if error.reason is not Reason.REQUEST_RATE_EXCEEDED:
        return {}
    return {
        "x-ratelimit-limit-requests": error.metadata["limit"],
        "x-ratelimit-remaining-requests": "0",
    }
