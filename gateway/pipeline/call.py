"""One request on its way through the pipeline: what its steps share, and what is recorded of them later."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from opentelemetry.trace import Span

from gateway.tiers import Tier
from gateway.types.request import Caller, GenerationRequest
from observability.emit.names import SpanName
from observability.emit.tracing import Telemetry, traceparent_of


class Call:
    """What the steps of one request share, and what is recorded of them once it is accepted or refused."""

    __slots__ = (
        "_telemetry",
        "_unrecorded",
        "caller",
        "entry_id",
        "is_closed",
        "request",
        "span",
        "tier",
        "traceparent",
    )

    def __init__(
        self,
        caller: Caller,
        request: GenerationRequest,
        tier: Tier,
        span: Span,
        telemetry: Telemetry,
    ) -> None:
        self.caller = caller
        self.request = request
        self.tier = tier
        # Whether its outcome is in the books.
        self.is_closed = False
        self.span = span
        # Id of its row in the ledger.
        self.entry_id = secrets.token_hex(16) if caller.entry_ids is None else next(caller.entry_ids)
        # Sent to other services, so that their spans of this request lie below its own.
        self.traceparent = traceparent_of(span)
        self._telemetry = telemetry
        self._unrecorded: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def later(self, work: Callable[..., None], *arguments: Any) -> None:
        """Has `work` called by `record`: the next service, and the client, do not wait for it."""
        self._unrecorded.append((work, arguments))

    def record(self) -> None:
        """Tells of the steps, and counts what is counted of them."""
        unrecorded, self._unrecorded = self._unrecorded, []
        for work, arguments in unrecorded:
            work(*arguments)

    def step(self, name: SpanName) -> Step:
        """Around a block that is a step of this request; its trace has it once it is recorded."""
        return Step(self, name)

    def end(self, step: Step, failure: BaseException | None) -> None:
        """Tells of a step that is over."""
        if not self.span.is_recording():
            return
        error = "" if failure is None else type(failure).__name__
        if error and self._telemetry.config.capture_content:
            error = f"{error}: {failure}"
        self._telemetry.step(
            step.name,
            of=self.span,
            start_s=step.start_s,
            end_s=step.end_s,
            attributes=step.attributes,
            error=error,
        )


class Step:
    """A step of a request. It is not current: no step looks for a current span."""

    __slots__ = ("_call", "attributes", "end_s", "name", "start_s")

    def __init__(self, call: Call, name: SpanName) -> None:
        self._call = call
        self.name = name
        self.attributes: dict[str, Any] = {}
        # In monotonic seconds; the end is 0 until it is over.
        self.start_s = time.monotonic()
        self.end_s = 0.0

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_s = time.monotonic()
        self._call.later(self._call.end, self, failure)
