"""One engine in virtual time: the shipped scheduler, whose steps last as long as the step model says.

It takes commands as `engine.core.loop.EngineLoop` does (between two steps) and reports as that does, but for
one thing: it says nothing of a step that only gave every answer its next token. So such steps can be skipped
over, and what gateways know is the same whether they are or not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate

from engine.core.step_record import StepShape
from engine.scheduler import Scheduler
from engine.types import (
    KvEvent,
    Request,
    SchedulerLoad,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenEvent,
)
from services.simulate.step_model import EngineSetup

# A token that no request stops at, and no prompt has.
TOKEN = 7
# Pause of a loop that has work which no plan can take up yet, as the engine's own.
_STALLED_S = 0.01


class Reports:
    """What an engine tells: who listens overrides it."""

    def tokens(self, request_id: int, ends_s: Sequence[float]) -> None:
        """A request has a token of each of these steps, none of which is its first or last."""

    def event(self, event: TokenEvent, now: float) -> None:
        """A request's first token, its end, or its failure."""

    def state(self, load: SchedulerLoad, kv_events: tuple[KvEvent, ...]) -> None:
        """What routers are told."""


class VirtualEngine:
    """`wake` does what is due; `next_s` says when that is again. `calls` asks to be woken at a moment."""

    def __init__(
        self,
        setup: EngineSetup,
        seed: int,
        reports: Reports,
        call_at: Callable[[float], None],
        *,
        skips: bool,
    ) -> None:
        self.scheduler = Scheduler(
            setup.scheduler,
            setup.cache,
            setup.memory,
            model="model",
            speed=setup.speed,
            attention_balance=setup.attention_balance,
        )
        self._model = setup.model
        self._factors = setup.model.factors(seed)
        self._num_steps = 0
        self._reports = reports
        self._call_at = call_at
        self._skips = skips
        self._inbox: deque[Request] = deque()
        self._plan: SchedulerOutput | None = None
        # The steps that are skipped over: their beginning, what each takes, and their ends.
        self._began_s = 0.0
        self._seconds: list[float] = []
        self._run: list[float] = []
        # When `wake` is due; stale calls come at other moments.
        self.next_s: float | None = None
        self.busy_s = 0.0

    def submit(self, request: Request, now: float) -> None:
        """A request comes; it is taken in when the step that runs has ended."""
        self._inbox.append(request)
        if self.next_s is None:
            self._wake_at(now)
        elif self._run:
            # The step that runs now is the last that can be skipped.
            while len(self._run) > 1 and self._run[-2] >= now:
                self._run.pop()
            if self.next_s != self._run[-1]:
                self._wake_at(self._run[-1])

    def stop(self, now: float) -> None:
        """It dies: what steps gave that have ended by now was told, and nothing else ever is."""
        self._run = [end_s for end_s in self._run if end_s < now]
        if self._run:
            self._end_run()
        self.next_s = None

    def _wake_at(self, at_s: float) -> None:
        self.next_s = at_s
        self._call_at(at_s)

    def wake(self, now: float) -> None:
        """The step that ran, or the run, has ended; or something came while nothing ran."""
        self.next_s = None
        scheduler, is_news = self.scheduler, bool(self._inbox)
        if self._run:
            self._end_run()
        elif self._plan is not None:
            plan, self._plan = self._plan, None
            self.busy_s += self._seconds[0]
            scheduler.update(_result(plan), now)
            is_news |= self._tell(plan, now)
        while self._inbox:
            scheduler.submit(self._inbox.popleft(), now)
        for event in scheduler.drain_events():
            self._reports.event(event, now)
        if is_news:
            self._reports.state(scheduler.load(now), scheduler.drain_kv_events())
        self._begin(now)

    def _tell(self, plan: SchedulerOutput, now: float) -> bool:
        """Tells what a step gave; whether that is more than a next token for everybody."""
        is_news = bool(plan.new_sequences or plan.released) or any(
            row.num_tokens > 1 for row in plan.scheduled
        )
        ends = (now,)
        for event in self.scheduler.drain_events():
            if event.first_token is None and event.finish_reason is None and event.failure is None:
                self._reports.tokens(event.request_id, ends)
            else:
                is_news = True
                self._reports.event(event, now)
        return is_news

    def _begin(self, now: float) -> None:
        scheduler = self.scheduler
        if self._skips:
            num_steps = scheduler.plain_steps.num_steps()
            if num_steps > 1:
                self._begin_run(now, num_steps)
                return
        plan = scheduler.schedule(now)
        if not plan.scheduled and plan.released:
            # The runner forgets who has ended, which takes no step.
            scheduler.update(StepResult(plan.step_id, ()), now)
            plan = scheduler.schedule(now)
        if plan.scheduled:
            self._plan = plan
            seconds = self._model.seconds(StepShape.of(plan)) * self._factor()
            self._seconds = [seconds]
            self._wake_at(now + seconds)
        elif scheduler.num_requests:
            self._wake_at(now + _STALLED_S)

    def _factor(self) -> float:
        self._num_steps += 1
        return self._factors[self._num_steps % len(self._factors)]

    def _begin_run(self, now: float, num_steps: int) -> None:
        num_answers, positions = self.scheduler.plain_steps.shape()
        answers_s, factors, first = self._model.answers_s, self._factors, self._num_steps + 1
        num_factors = len(factors)
        self._seconds = [
            answers_s(num_answers, positions + num_answers * step) * factors[(first + step) % num_factors]
            for step in range(num_steps)
        ]
        self._began_s = now
        self._run = list(accumulate(self._seconds, initial=now))[1:]
        self._wake_at(self._run[-1])

    def _end_run(self) -> None:
        ends, self._run = self._run, []
        self._num_steps += len(ends)
        for seconds in self._seconds[: len(ends)]:
            self.busy_s += seconds
        for request_id in self.scheduler.plain_steps.take(self._began_s, ends, TOKEN):
            self._reports.tokens(request_id, ends)


def _result(plan: SchedulerOutput) -> StepResult:
    results = tuple(
        SequenceResult(row.sequence_id, (TOKEN,) if row.samples else ()) for row in plan.scheduled
    )
    return StepResult(plan.step_id, results)
