"""Who calls, and until when."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from opentelemetry.trace import Span

# Who is asking: the verified request context as a domain type.

# Characters of a client's own id that are kept.
MAX_CLIENT_REQUEST_ID = 128


class Identity(msgspec.Struct, frozen=True):
    """What authentication established about one request. Nothing in it comes from the client unchecked."""

    request_id: str
    tenant: str
    # Public identifier of the API key, or "jwt:<subject>"; never the secret.
    key_id: str
    # Tier that the request gets unless it asks for another one.
    tier: str
    # Separates prefix-cache entries between tenants.
    cache_salt: bytes = b""
    # Models that the key may use; empty means every model.
    allowed_models: tuple[str, ...] = ()
    # W3C trace context of the edge.
    traceparent: str = ""
    tracestate: str = ""
    # Moment after which nobody wants the answer, milliseconds since the Unix epoch; None means none.
    deadline_unix_ms: int | None = None


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """A verified caller and its call. Moments are monotonic seconds."""

    identity: Identity
    # When the call's first byte was read.
    received_s: float
    # Parent of this call's spans, with the request's identity for every span below.
    trace: Span
    # When nobody wants the answer any more.
    deadline_s: float | None = None
    # The client's own x-request-id, cut to a length that every span can carry.
    client_request_id: str = ""
    # How often the client has sent it before, by its own word.
    num_retries: int = 0
    # The context as it came (a message, which `auth` alone reads), of a call that somebody in front has
    # authenticated, counted and signed.
    context: Any = None

    def remaining_s(self) -> float:
        """Seconds until the deadline, at least 0; infinity without one."""
        return math.inf if self.deadline_s is None else max(0.0, self.deadline_s - time.monotonic())
