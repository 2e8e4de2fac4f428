"""Who calls: the context that the edge signed, verified; and the context signed again for what follows."""

from __future__ import annotations

import math
import time

import msgspec
from millrace.common.v1 import context_pb2
from opentelemetry.trace import Span

from gateway.auth.convert import identity_from_context, write_tier
from gateway.identity import MAX_CLIENT_REQUEST_ID, Identity
from gateway.tiers import Tier, Tiers
from observability.tracing import RequestIdentity, remote_span
from services.config import SecurityConfig
from services.context import CONTEXT_HEADER, from_header, sign, verify
from services.errors import MillraceError, Reason


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A verified caller and its call. Moments are monotonic seconds."""

    identity: Identity
    # The edge's context as it came.
    context: context_pb2.RequestContext
    # When the call's first byte was read.
    received_s: float
    # Parent of this call's spans, with the request's identity for every span below.
    trace: Span
    # When nobody wants the answer any more.
    deadline_s: float | None = None
    # The client's own x-request-id, cut to a length that every span can carry.
    client_request_id: str = ""
    # Somebody in front has authenticated and counted the call, and signed its context.
    was_signed: bool = False

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0; infinity without one."""
        return math.inf if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())


class CallerVerifier:
    """Checks contexts from the edge and makes those for the services behind."""

    def __init__(self, security: SecurityConfig, tiers: Tiers) -> None:
        self._secret = security.secret()
        self._max_age_s = security.max_context_age_s
        self._tiers = tiers

    def verify(
        self,
        header: str | None,
        *,
        received_s: float,
        traceparent: str = "",
        tracestate: str = "",
        client_request_id: str = "",
        timeout_s: float | None = None,
    ) -> Caller:
        """The caller behind the x-millrace-context header.

        Raises MISSING_CREDENTIALS or CONTEXT_SIGNATURE_INVALID.

        `timeout_s` is the client's own deadline, from now; the earlier of it and the edge's counts.
        """
        if not header:
            raise MillraceError(
                Reason.MISSING_CREDENTIALS,
                f"the request has no {CONTEXT_HEADER}; send it to the edge with an API key "
                "(authorization: Bearer <key>), not to the gateway itself",
            )
        now_unix_ms = time.time_ns() // 1_000_000
        context = verify(
            from_header(header), self._secret, now_unix_ms=now_unix_ms, max_age_s=self._max_age_s
        )
        return self._caller(
            context,
            received_s=received_s,
            traceparent=traceparent or context.traceparent,
            tracestate=tracestate if traceparent else context.tracestate,
            client_request_id=client_request_id,
            timeout_s=timeout_s,
            was_signed=True,
        )

    def caller(
        self, context: context_pb2.RequestContext, *, received_s: float, client_request_id: str
    ) -> Caller:
        """The caller of a context that this process has made itself."""
        return self._caller(
            context,
            received_s=received_s,
            traceparent=context.traceparent,
            tracestate=context.tracestate,
            client_request_id=client_request_id,
            timeout_s=None,
            was_signed=False,
        )

    def _caller(
        self,
        context: context_pb2.RequestContext,
        *,
        received_s: float,
        traceparent: str,
        tracestate: str,
        client_request_id: str,
        timeout_s: float | None,
        was_signed: bool,
    ) -> Caller:
        identity = identity_from_context(context)
        client_request_id = client_request_id[:MAX_CLIENT_REQUEST_ID]
        now_s = time.monotonic()
        deadline_s = None if timeout_s is None else now_s + timeout_s
        if identity.deadline_unix_ms is not None:
            edge_s = now_s + (identity.deadline_unix_ms - time.time_ns() // 1_000_000) / 1000
            deadline_s = edge_s if deadline_s is None else min(deadline_s, edge_s)
        return Caller(
            identity=identity,
            context=context,
            received_s=received_s,
            trace=remote_span(
                traceparent,
                tracestate,
                RequestIdentity(identity.request_id, client_request_id, identity.tenant, identity.tier),
            ),
            deadline_s=deadline_s,
            client_request_id=client_request_id,
            was_signed=was_signed,
        )

    def sign(self, caller: Caller, tier: Tier, traceparent: tuple[str, str]) -> context_pb2.SignedContext:
        """The context under the effective tier, with the caller's deadline, below the given span."""
        context = context_pb2.RequestContext()
        context.CopyFrom(caller.context)
        context.client_request_id = caller.client_request_id
        write_tier(context, tier, tenant_weight=self._tiers.tenant_weight(context.tenant))
        context.traceparent, context.tracestate = traceparent
        now_unix_ms = time.time_ns() // 1_000_000
        context.issued_unix_ms = now_unix_ms
        if caller.deadline_s is not None:
            context.deadline_unix_ms = now_unix_ms + round((caller.deadline_s - time.monotonic()) * 1000)
        return sign(context, self._secret)
