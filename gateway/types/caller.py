"""Who calls, and until when."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from opentelemetry.trace import Span

from gateway.types.identity import Identity


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
