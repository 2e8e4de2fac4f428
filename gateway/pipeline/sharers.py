"""Whose work was in the way of an answer, as far as its own tenant may know: requests of that tenant alone.

An engine tells which causes held a request back, and for how long. What it worked on meanwhile, the gateway
knows of the requests that it sent there itself. `Books` keep them, and an `Attempt` asks for its usage.
Requests of other tenants are never told of, and those of other gateways are not known.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.pipeline.delta import Meter, SharedTime
from observability.emit.names import Cause

# Of one tenant, and tenants: the newest are known.
_MAX_WORK, _MAX_TENANTS = 64, 1024
# Less is not worth telling, in seconds; nor are more requests than these.
_MIN_S, _MOST = 0.005, 3
# Causes for which those are to blame who have a place in the batch, or blocks.
_OF_PLACES = (Cause.KV_PRESSURE, Cause.PREEMPTION, Cause.BATCH_FULL, Cause.HIGHER_TIER, Cause.ANSWER_PACE)
_Interval = tuple[float, float]


class OwnRequest(NamedTuple):
    """One request's work on one engine; its times are those of its meter."""

    request_id: str
    engine: str
    meter: Meter

    def prefill(self, now_s: float) -> _Interval:
        """From the submission to the first token."""
        begun_s = self.meter.submitted_s or now_s
        return begun_s, self.meter.first_output_s or now_s

    def place(self, now_s: float) -> _Interval:
        """From the first token to the last one; empty before."""
        begun_s = self.meter.first_output_s
        return (now_s, now_s) if begun_s is None else (begun_s, self.meter.last_output_s)


class OwnWork:
    """The newest requests of each tenant that this gateway has sent to engines."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[OwnRequest]] = OrderedDict()

    def add(self, tenant: str, work: OwnRequest) -> None:
        """A request goes to an engine."""
        self._tenants.setdefault(tenant, deque(maxlen=_MAX_WORK)).append(work)
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > _MAX_TENANTS:
            self._tenants.popitem(last=False)

    def shared(
        self, tenant: str, own: OwnRequest, delayed_by_s: Mapping[str, float]
    ) -> tuple[SharedTime, ...]:
        """The requests whose work overlapped most with the time that `own` lost, by cause."""
        now_s = time.monotonic()
        others = [
            each
            for each in self._tenants.get(tenant, ())
            if each.engine == own.engine and each.request_id != own.request_id
        ]
        wait = own.prefill(now_s)
        found: list[SharedTime] = []
        if delayed_by_s.get(Cause.LONG_PREFILL, 0.0) >= _MIN_S:
            whole = (wait[0], max(wait[1], own.meter.last_output_s))
            found += _most(((each, each.prefill(now_s)) for each in others), whole, Cause.LONG_PREFILL)
        held = max(_OF_PLACES, key=lambda cause: delayed_by_s.get(cause, 0.0))
        if delayed_by_s.get(held, 0.0) >= _MIN_S:
            found += _most(((each, each.place(now_s)) for each in others), wait, held)
        return tuple(found)


def _most(times: Iterable[tuple[OwnRequest, _Interval]], lost: _Interval, cause: Cause) -> list[SharedTime]:
    overlaps = [
        SharedTime(work.request_id, cause.value, min(end_s, lost[1]) - max(begun_s, lost[0]))
        for work, (begun_s, end_s) in times
    ]
    longest = sorted(overlaps, key=lambda each: -each.overlap_s)[:_MOST]
    return [each for each in longest if each.overlap_s >= _MIN_S]
