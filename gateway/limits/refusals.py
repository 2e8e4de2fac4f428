"""Refusals of limits: whose limit, how much, and when to come back."""

from __future__ import annotations

from contract.errors import MillraceError, Reason
from gateway.limits.prices import NANOS_PER_UNIT
from gateway.limits.store import Demand, Kind, LeaseDemand, LimitRefused, MeterDemand, WindowDemand
from gateway.types.error_form import whole_s

# Advice where nothing but the end of another stream helps.
_SLOT_RETRY_S = 1.0


def refusal(refused: LimitRefused, demand: Demand) -> MillraceError:
    """The error for the counter of `demand` that refused."""
    if refused.kind is Kind.WINDOW:
        return _token_rate_exceeded(refused, demand.windows[refused.index])
    if refused.kind is Kind.LEASE:
        return _concurrency_exceeded(refused, demand.leases[refused.index])
    return _budget_exhausted(refused, demand.meters[refused.index])


def limits_unavailable() -> MillraceError:
    """The refusal of the "closed" policy while the store is lost."""
    return MillraceError(
        Reason.LIMITS_UNAVAILABLE,
        "the limit store does not answer, and the configured policy (gateway.limits.on_store_loss) is to "
        "refuse meanwhile; retry shortly",
        retry_after_s=1.0,
    )


def is_cost_meter(key: str) -> bool:
    """Whether a meter counts billionths of the currency unit instead of tokens."""
    return key.split(":")[-2] == "cost"


def stream_limit_name(key: str) -> str:
    """The setting behind a lease, and whose it is."""
    setting = "max_concurrency" if key.startswith("tier:") else "max_concurrent_streams"
    return f"{setting} of {_holder(key)}"


def _holder(key: str) -> str:
    kind, name, *_ = key.split(":")
    return f"{kind} {name}"


def _token_rate_exceeded(refused: LimitRefused, window: WindowDemand) -> MillraceError:
    metadata = {"limit": str(window.limit), "used": str(refused.used), "requested": str(window.amount)}
    if window.amount > window.limit:
        return MillraceError(
            Reason.TOKEN_RATE_EXCEEDED,
            f"the request may use {window.amount} tokens, more than the {window.limit} tokens a minute of "
            f"{_holder(window.key)}; shorten the prompt or lower max_tokens",
            field="max_tokens",
            metadata=metadata,
        )
    wait_s = (refused.retry_after_ms or 1000) / 1000
    return MillraceError(
        Reason.TOKEN_RATE_EXCEEDED,
        f"{_holder(window.key)} has used {refused.used} of {window.limit} tokens in the last minute and the "
        f"request may use {window.amount}; retry in {whole_s(wait_s)} s or lower max_tokens",
        metadata=metadata,
        retry_after_s=wait_s,
    )


def _concurrency_exceeded(refused: LimitRefused, lease: LeaseDemand) -> MillraceError:
    return MillraceError(
        Reason.CONCURRENCY_EXCEEDED,
        f"{_holder(lease.key)} has {refused.used} streams running and this request has {lease.slots}; the "
        f"limit is {lease.limit}; wait for some to end",
        metadata={
            "limit": str(lease.limit),
            "used": str(refused.used),
            "requested": str(lease.slots),
            "scope": _holder(lease.key),
        },
        retry_after_s=_SLOT_RETRY_S,
    )


def _budget_exhausted(refused: LimitRefused, meter: MeterDemand) -> MillraceError:
    unit, scale = ("currency units", NANOS_PER_UNIT) if is_cost_meter(meter.key) else ("tokens", 1)
    return MillraceError(
        Reason.BUDGET_EXHAUSTED,
        f"the monthly limit of {_holder(meter.key)} is {meter.limit / scale:g} {unit} and "
        f"{refused.used / scale:g} are used, which leaves too little for this request; it is renewed on "
        "the first of the next month (UTC), or raise the limit",
        metadata={"limit": f"{meter.limit / scale:g}", "used": f"{refused.used / scale:g}"},
    )
