"""The context that the edge signed, verified; and the context signed again for what follows."""

from __future__ import annotations

import re
import time
from typing import Literal, get_args

import msgspec
from millrace.common.v1 import context_pb2
from msgspec.structs import replace

from contract.errors import MillraceError, Reason
from gateway.tiers import Tier, Tiers
from gateway.types.error_form import KEY_ADVICE
from gateway.types.request import MAX_CLIENT_REQUEST_ID, Caller, Identity
from observability.emit.tracing import RemoteSpan, RequestIdentity
from runtime.config import SecurityConfig
from runtime.context import CONTEXT_HEADER, from_header, sign, verify

# Between the request context's message and the gateway's domain types.

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


# A count of retries: clients send it, so nothing longer is read as a number.
_IS_COUNT = re.compile(r"[0-9]{1,4}").fullmatch


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """When a call came, and with which headers."""

    received_s: float
    # The trace is that of the identity where none is given.
    traceparent: str = ""
    tracestate: str = ""
    client_request_id: str = ""
    # The header in which SDKs count their retries: digits, or whatever a client sends.
    retries: str = ""
    # The client's own deadline, from now; the earlier of it and the edge's counts.
    timeout_s: float | None = None


class CallerVerifier:
    """Checks contexts from the edge and makes those for the services behind."""

    def __init__(self, security: SecurityConfig, tiers: Tiers) -> None:
        self._secret = security.secret()
        self._max_age_s = security.max_context_age_s
        self._tiers = tiers

    def verify(self, header: str | None, arrival: Arrival) -> Caller:
        """The caller behind the x-millrace-context header.

        Raises MISSING_CREDENTIALS or CONTEXT_SIGNATURE_INVALID.
        """
        if not header:
            raise MillraceError(
                Reason.MISSING_CREDENTIALS,
                f"the request has no {CONTEXT_HEADER}; send it to the edge with an API key, {KEY_ADVICE}, "
                "not to the gateway itself",
            )
        now_unix_ms = time.time_ns() // 1_000_000
        context = verify(
            from_header(header), self._secret, now_unix_ms=now_unix_ms, max_age_s=self._max_age_s
        )
        return self.caller(identity_from_context(context), arrival, context)

    def caller(
        self, identity: Identity, arrival: Arrival, context: context_pb2.RequestContext | None = None
    ) -> Caller:
        """A caller who is known, with `context` if somebody in front has signed one."""
        traceparent, tracestate = arrival.traceparent, arrival.tracestate
        if not traceparent:
            traceparent, tracestate = identity.traceparent, identity.tracestate
        client_request_id = arrival.client_request_id[:MAX_CLIENT_REQUEST_ID]
        now_s = time.monotonic()
        deadline_s = None if arrival.timeout_s is None else now_s + arrival.timeout_s
        if identity.deadline_unix_ms is not None:
            edge_s = now_s + (identity.deadline_unix_ms - time.time_ns() // 1_000_000) / 1000
            deadline_s = edge_s if deadline_s is None else min(deadline_s, edge_s)
        return Caller(
            identity=identity,
            received_s=arrival.received_s,
            trace=RemoteSpan(
                traceparent,
                tracestate,
                RequestIdentity(identity.request_id, client_request_id, identity.tenant, identity.tier),
            ),
            deadline_s=deadline_s,
            client_request_id=client_request_id,
            num_retries=int(arrival.retries) if _IS_COUNT(arrival.retries) else 0,
            context=context,
        )

    def again(self, caller: Caller, request_id: str, received_s: float) -> Caller:
        """The same caller with another request under the same context."""
        identity = replace(caller.identity, request_id=request_id)
        arrival = Arrival(received_s=received_s, client_request_id=caller.client_request_id)
        context = context_pb2.RequestContext()
        context.CopyFrom(caller.context)
        context.request_id = request_id
        return self.caller(identity, arrival, context)

    def sign(
        self, caller: Caller, tier: Tier, traceparent: tuple[str, str], model: str = ""
    ) -> context_pb2.SignedContext:
        """The context under the effective tier, with the caller's deadline, below the given span; for `model`
        alone, where the caller may not use all.
        """
        weight = self._tiers.tenant_weight(caller.identity.tenant)
        now_unix_ms = time.time_ns() // 1_000_000
        if caller.context is None:
            context = context_of(caller.identity, tier, tenant_weight=weight)
        else:
            context = context_pb2.RequestContext()
            context.CopyFrom(caller.context)
            write_tier(context, tier, tenant_weight=weight)
            # A request may have narrowed it.
            context.cache_salt = caller.identity.cache_salt
            context.issued_unix_ms = now_unix_ms
        if model and context.allowed_models:
            # An alias or an adapter is what was allowed, this is what it stands for.
            context.allowed_models[:] = [model]
        context.client_request_id = caller.client_request_id
        context.traceparent, context.tracestate = traceparent
        if caller.deadline_s is not None:
            context.deadline_unix_ms = now_unix_ms + round((caller.deadline_s - time.monotonic()) * 1000)
        return sign(context, self._secret)
