"""Between the request context's message and the gateway's domain types."""

from __future__ import annotations

import time
from typing import Literal, get_args

from millrace.common.v1 import context_pb2

from gateway.tiers import Tier
from gateway.types.identity import Identity

_Promise = Literal["ttft_target_ms", "tpot_target_ms", "max_context_tokens"]
_OPTIONAL_PROMISES: tuple[_Promise, ...] = get_args(_Promise)


def identity_from_context(context: context_pb2.RequestContext) -> Identity:
    """The identity in a verified context."""
    return Identity(
        request_id=context.request_id,
        tenant=context.tenant,
        key_id=context.key_id,
        tier=context.tier,
        cache_salt=context.cache_salt,
        allowed_models=tuple(context.allowed_models),
        traceparent=context.traceparent,
        tracestate=context.tracestate,
        deadline_unix_ms=context.deadline_unix_ms if context.HasField("deadline_unix_ms") else None,
    )


def write_tier(context: context_pb2.RequestContext, tier: Tier, *, tenant_weight: float) -> None:
    """Replaces the promises in `context` by those of `tier`."""
    config = tier.config
    context.tier = tier.name
    context.priority = config.priority
    context.weight = config.weight * tenant_weight
    for name in _OPTIONAL_PROMISES:
        context.ClearField(name)
        value = getattr(config, name)
        if value is not None:
            setattr(context, name, value)
    context.ClearField("queue_limit_ms")
    if config.accepted_within_ms is not None:
        context.queue_limit_ms = config.accepted_within_ms


def context_of(identity: Identity, tier: Tier, *, tenant_weight: float) -> context_pb2.RequestContext:
    """The context of one request under `tier`, issued now."""
    context = context_pb2.RequestContext(
        request_id=identity.request_id,
        tenant=identity.tenant,
        key_id=identity.key_id,
        allowed_models=identity.allowed_models,
        cache_salt=identity.cache_salt,
        traceparent=identity.traceparent,
        tracestate=identity.tracestate,
        issued_unix_ms=time.time_ns() // 1_000_000,
    )
    write_tier(context, tier, tenant_weight=tenant_weight)
    return context
