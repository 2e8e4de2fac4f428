"""Who is accepted at a vLLM engine, decided in the front before its core hears of a request.

The rules and the words are those of `engine.scheduler.admission`; what is coarser is the forecast. It counts
requests and tokens from outside: what waits is what has no first token yet, and places come free at the
measured rate at which answers end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from contract.errors import RequestFailure
from engine.config import SchedulerConfig
from engine.core.messages import StepDone
from engine.scheduler.admission import refuse_for_now, refuse_impossible
from engine.scheduler.forecast import Forecast
from engine.scheduler.pace import EventRate
from engine.scheduler.queue import Line
from engine.types import MemoryPlan, Request, SchedulerLoad, TokenEvent
from engine.vllm_core.options import refuse

# How long an ended answer counts for the rate at which places come free, in seconds.
_MEMORY_S = 10.0


@dataclass(slots=True)
class _Inside:
    """A request that the core has."""

    request: Request
    num_open: int
    has_begun: bool = False


class _Waiting:
    """Requests without a first token, by account. See engine.scheduler.admission.Waiting."""

    def __init__(self, inside: Mapping[int, _Inside]) -> None:
        self._waiting = [each.request for each in inside.values() if not each.has_begun]

    def __len__(self) -> int:
        return len(self._waiting)

    def accounts_of(self, priority: int) -> Mapping[str, Line]:
        lines: dict[str, Line] = {}
        for request in self._waiting:
            if request.priority == priority:
                line = lines.setdefault(request.tenant, Line(weight=request.weight))
                line.num_sequences += 1
                line.num_places += request.sampling.n
                line.num_tokens += len(request.prompt_token_ids)
        return lines

    def ahead(self, request: Request) -> Line:
        """What is served before a new request: higher tiers, and the fair part of its own."""
        found = Line()
        own = self.accounts_of(request.priority).get(request.tenant, Line())
        for each in self._waiting:
            if each.priority > request.priority:
                found.num_places += each.sampling.n
                found.num_tokens += len(each.prompt_token_ids)
        for line in self.accounts_of(request.priority).values():
            fair = math.ceil((own.num_places + 1) * line.weight / request.weight)
            part = min(1.0, fair / max(1, line.num_places))
            found.num_places += min(line.num_places, fair)
            found.num_tokens += math.ceil(part * line.num_tokens)
        return found


class Door:
    """Knows every request inside by the events that pass. Lives in the front."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._memory: MemoryPlan | None = None
        self._load: SchedulerLoad | None = None
        self._inside: dict[int, _Inside] = {}
        self._ended = EventRate(_MEMORY_S, running=False)

    def opens(self, memory: MemoryPlan) -> None:
        """The core is ready."""
        self._memory = memory

    def refusal(self, request: Request, now: float) -> RequestFailure | None:
        """Why a request is not accepted; None when it is, and then it is inside."""
        lacks = refuse(request)
        if lacks is not None:
            return RequestFailure.of(lacks)
        if self._memory is not None:
            failure = refuse_impossible(request, self._memory, self._config.max_num_seqs)
            waiting = _Waiting(self._inside)
            failure = failure or refuse_for_now(
                request, self._forecast(request, waiting, now), waiting, self._config, now
            )
            if failure is not None:
                return failure
        self._inside[request.request_id] = _Inside(request, request.sampling.n)
        self._ended.run(now, running=True)
        return None

    def passes(self, step: StepDone, now: float) -> None:
        """Takes note of what the core tells."""
        self._load = step.load
        for event in step.events:
            self._note(event, now)
        if not self._inside:
            self._ended.run(now, running=False)

    def _note(self, event: TokenEvent, now: float) -> None:
        inside = self._inside.get(event.request_id)
        if inside is None:
            return
        inside.has_begun = True
        if event.finish_reason is not None:
            inside.num_open -= 1
            self._ended.count(now)
        if event.failure is not None or inside.num_open == 0:
            del self._inside[event.request_id]

    def _forecast(self, request: Request, waiting: _Waiting, now: float) -> Forecast:
        ahead, load = waiting.ahead(request), self._load
        places = sum(each.num_open for each in self._inside.values() if each.has_begun)
        missing = places + ahead.num_places + request.sampling.n - self._config.max_num_seqs
        wait_s = 0.0
        if missing > 0:
            rate = self._ended.per_s(now) if self._ended.is_known and self._ended.is_fresh else 0.0
            few = missing <= self._config.max_num_seqs
            wait_s = missing / rate if rate else 0.0 if few else math.inf
        speed = load.prefill_tokens_per_s if load is not None else 0.0
        prompts_s = ahead.num_tokens / speed if speed else 0.0
        wait_s = max(wait_s, prompts_s)
        return Forecast(
            wait_s=wait_s,
            usual_wait_s=wait_s,
            told_wait_s=wait_s,
            prompt_s=len(request.prompt_token_ids) / speed if speed else 0.0,
            line_s=0.0,
            is_back=False,
            leads=False,
            prompt=0,
            weighted_tokens=0.0,
        )
