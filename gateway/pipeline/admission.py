"""Refuses at once what would wait longer than its tier promises, with the time after which to come back."""

from __future__ import annotations

from gateway.engines.fleet import Fleet
from gateway.tiers import Tier
from services.errors import MillraceError, Reason

# A hint below this would make clients come back into the same queue.
MIN_RETRY_AFTER_S = 0.25


def expected_wait_s(fleet: Fleet, prompt_tokens: int) -> float:
    """Seconds until a new request's prompt is computed on the engine with the shortest queue.

    Work ahead is what the engines report and what was submitted since; the rate is what they measured. 0
    while no engine has measured a rate, or its queue is empty.
    """
    waits = []
    for attachment in fleet.ready:
        load = attachment.load
        pending = max(load.pending_prefill_tokens, attachment.unstarted_tokens)
        if not load.prefill_tokens_per_s or not pending:
            return 0.0
        waits.append((pending + prompt_tokens) / load.prefill_tokens_per_s)
    return min(waits, default=0.0)


def admit(fleet: Fleet, tier: Tier, prompt_tokens: int) -> float:
    """The expected wait in seconds; raises QUEUE_LIMIT_EXCEEDED when the tier does not allow it."""
    wait_s = expected_wait_s(fleet, prompt_tokens)
    limit_ms = tier.config.queue_limit_ms
    if limit_ms is not None and wait_s * 1000 > limit_ms:
        retry_after_s = max(MIN_RETRY_AFTER_S, wait_s - limit_ms / 1000)
        raise MillraceError(
            Reason.QUEUE_LIMIT_EXCEEDED,
            f"the request would wait {wait_s * 1000:.0f} ms; tier {tier.name} allows {limit_ms} ms: "
            f"try again in {retry_after_s:.1f} s",
            metadata={"expected_wait_ms": f"{wait_s * 1000:.0f}", "queue_limit_ms": str(limit_ms)},
            retry_after_s=retry_after_s,
        )
    return wait_s
