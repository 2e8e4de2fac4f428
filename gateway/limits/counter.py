"""Requests per minute as both faces count them: with a span, and with what refusals tell."""

from __future__ import annotations

import time

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from contract.errors import MillraceError, Reason
from gateway.limits.requests import RequestLimiter
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry


class RequestCounter:
    """Counts requests of callers to whom a limit applies, once each."""

    def __init__(self, limiter: RequestLimiter, telemetry: Telemetry, metrics: Metrics) -> None:
        self._limiter = limiter
        self._telemetry = telemetry
        self._metrics = metrics

    async def count(self, tenant: str, key_id: str, caller: Span | None = None) -> dict[str, str]:
        """See RequestLimiter.admit; its trace is below the caller's span, by default the current one."""
        attributes: dict[str, AttributeValue] = {names.TENANT: tenant, names.KEY_ID: key_id}
        started_s = time.monotonic()
        refusal = ""
        try:
            return await self._limiter.admit(tenant, key_id)
        except MillraceError as error:
            refusal = attributes[names.OUTCOME] = error.reason.value
            if error.retry_after_s is not None:
                attributes[names.RETRY_AFTER_S] = error.retry_after_s
            self._metrics.add(names.REJECTIONS, reason=error.reason.value, tier="")
            raise
        finally:
            self._telemetry.step(
                names.GATEWAY_RATE_LIMIT,
                of=trace.get_current_span() if caller is None else caller,
                start_s=started_s,
                end_s=time.monotonic(),
                attributes=attributes,
                error=refusal,
            )


def exceeded_headers(error: MillraceError) -> dict[str, str]:
    """What a refusal says of the limit in its headers; nothing if it is not about one."""
    if error.reason is not Reason.REQUEST_RATE_EXCEEDED:
        return {}
    return {
        "x-ratelimit-limit-requests": error.metadata["limit"],
        "x-ratelimit-remaining-requests": "0",
    }
