"""Requests per minute of tenants and keys, as both faces count them: with a span, and with what refusals say.

The sum admitted in any 60 s never passes the limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue

from contract.errors import MillraceError, Reason
from gateway.limits.limiter import WindowView, window_headers
from gateway.limits.refusals import limits_unavailable
from gateway.limits.store import (
    Demand,
    LimitDirectory,
    LimitRefused,
    LimitStore,
    Scope,
    StoreLostError,
    WindowDemand,
    requests_key,
    scopes_of,
    unix_s,
)
from gateway.types.error_form import whole_s
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry


class RequestLimiter:
    """Counts each request once, against its tenant and its key, before anything else is spent on it."""

    def __init__(
        self, store: LimitStore, directory: LimitDirectory, *, clock: Callable[[], float] = unix_s
    ) -> None:
        self._store = store
        self._directory = directory
        self._clock = clock

    async def admit(self, tenant: str, key_id: str) -> dict[str, str]:
        """Counts a request; returns its `x-ratelimit-*-requests` headers.

        Raises REQUEST_RATE_EXCEEDED with the time after which one fits, whose metadata `limit` is the limit
        that refused, and LIMITS_UNAVAILABLE when the store is lost and the policy is to refuse.
        """
        scopes = [
            (scope, scope.limits.requests_per_minute)
            for scope in scopes_of(self._directory, tenant, key_id)
            if scope.limits.requests_per_minute is not None
        ]
        if not scopes:
            return {}
        windows = tuple(WindowDemand(requests_key(scope), limit, 1) for scope, limit in scopes)
        try:
            outcome = await self._store.acquire(Demand(windows=windows))
        except StoreLostError as error:
            raise limits_unavailable() from error
        if isinstance(outcome, LimitRefused):
            raise _refusal(outcome, *scopes[outcome.index])
        now_s = self._clock()
        sums = zip(windows, outcome.window_sums, strict=True)
        views = [WindowView(window.limit, used, now_s) for window, used in sums]
        return window_headers("requests", views, now_s)


def _refusal(refused: LimitRefused, scope: Scope, limit: int) -> MillraceError:
    wait_s = (refused.retry_after_ms or 1000) / 1000
    return MillraceError(
        Reason.REQUEST_RATE_EXCEEDED,
        f"{scope} may send {limit} requests a minute and has sent {refused.used}; "
        f"retry in {whole_s(wait_s)} s",
        metadata={"limit": str(limit), "scope": str(scope)},
        retry_after_s=wait_s,
    )


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
