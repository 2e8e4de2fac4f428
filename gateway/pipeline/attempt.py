"""One prepared submission to one model: deltas until every choice has ended, then exactly one outcome.

`Attempts` opens it, an `Answer` is one or several, `Books` are called once when it ends. It knows no
connection.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import msgspec

from contract.engines import CancelReason
from contract.errors import MillraceError, Reason
from contract.outputs import FinishReason
from gateway.engines.attachment import Computed
from gateway.engines.continuation import ContinuousStream
from gateway.engines.types import EngineOutput
from gateway.intake.intake import Slices
from gateway.limits.limiter import Charges, Reservation
from gateway.models.catalog import Target
from gateway.pipeline.call import Call
from gateway.pipeline.delta import (
    AnswerInfo,
    AnswerReader,
    ChoiceDelta,
    ChoiceStream,
    Meter,
    ReadOutput,
    SharedTime,
    Usage,
)
from gateway.pipeline.judge import OutputJudge
from gateway.pipeline.ports import INTERRUPTED, OpenEntry, Progress
from gateway.pipeline.transcript import Transcript

# Outputs after which it is asked whether others had better go on: some tenths of a millisecond.
_IN_ONE_SLICE = 16
# Outcome of a request whose client went away.
CANCELLED = Reason.CANCELLED.value


class Outcome(msgspec.Struct, frozen=True):
    """How a request ended: a finish reason in lower case, or a reason of the error table."""

    name: str

    @property
    def is_failure(self) -> bool:
        """Whether its choices did not all end, be it that its client went away."""
        return self.name.isupper()


class AttemptBooks(Protocol):
    """Records attempts: when one begins, and once when it has ended."""

    def gap_observer(self, call: Call, target: Target) -> Callable[[float], None]:
        """Called with the seconds between every two outputs of an attempt."""
        ...

    def open(self, attempt: Attempt, charges: Charges) -> OpenEntry:
        """It goes to an engine."""
        ...

    def close(self, attempt: Attempt, outcome: Outcome, usage: Usage) -> None:
        """It has ended."""
        ...

    def supersede(self, attempt: Attempt) -> None:
        """Another attempt of the same call has its place, and its entry in the ledger."""
        ...

    def shared_with(self, attempt: Attempt) -> tuple[SharedTime, ...]:
        """Other requests of its tenant's that its engine worked on while it was held back."""
        ...


class Attempt:
    """`drain` until it returns nothing. Use as an async context manager: leaving it settles whatever
    happened.
    """

    # Its tokens, where another model's are compared with them afterwards.
    kept_ids: list[int] | None = None
    # Outputs that came while `refusal` waited, for the first `drain`.
    _first: Sequence[EngineOutput] = ()
    _refused: MillraceError | None = None

    def __init__(
        self,
        *,
        call: Call,
        target: Target,
        fallback_from: str,
        info: AnswerInfo,
        reader: AnswerReader,
        stream: ContinuousStream,
        choices: dict[int, ChoiceStream],
        reservation: Reservation,
        meter: Meter,
        books: AttemptBooks,
        judge: OutputJudge | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        self.call = call
        self.target = target
        # The model that refused the call for its load; "" where none was asked before.
        self.fallback_from = fallback_from
        self.info = info
        # Makes text of tokens, for the model that answers.
        self.reader = reader
        self.meter = meter
        # Judges complete answers whose schema is not enforced wholly.
        self.judge = judge
        # Keeps what is answered, where traces are to have it.
        self.transcript = transcript
        self.stream = stream
        self._choices = choices
        # Those that have not ended.
        self._open = set(choices)
        self._reservation = reservation
        # max_tokens was 0: the one token that every prompt's step samples is not shown.
        self._discard_tokens = call.request.sampling.max_tokens == 0
        self._books = books
        self._deadline: asyncio.TimerHandle | None = None
        self._finish_reason: FinishReason | None = None
        # Nothing more is paid for, and tokens came that are therefore not sent.
        self._is_spent = False
        self._settled = False
        # Nothing was generated, and no engine has worked on the prompt: nothing is charged.
        self._is_refunded = False
        stream.when_full(self.fall_behind)
        # Kept, so that it is not collected while it runs.
        self._settling: asyncio.Task[None] | None = None
        self.entry = books.open(self, reservation.charges)

    async def __aenter__(self) -> Attempt:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(error)

    async def close(self, error: BaseException | None) -> None:
        """Settles, with `error` as what ended the request; once, however often it is called."""
        if isinstance(error, MillraceError):
            outcome = Outcome(error.reason.value)
        elif error is not None and not isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = Outcome(Reason.INTERNAL.value)
        elif self._open:
            outcome = Outcome(CANCELLED)
        else:
            reason = self._finish_reason or FinishReason.STOP
            outcome = Outcome(reason.name.lower())
        await self._settle(outcome)

    @property
    def engine(self) -> str:
        """Engine that serves the request now."""
        return self.stream.engine

    @property
    def pool(self) -> str:
        """Pool of that engine, "" where it names none."""
        return self.stream.pool

    def expire_at(self, deadline_s: float) -> None:
        """Ends the request with DEADLINE_EXCEEDED at a monotonic moment."""
        loop = asyncio.get_running_loop()
        delay_s = max(0.0, deadline_s - time.monotonic())
        self._deadline = loop.call_later(delay_s, self._expire)

    def cancel(self) -> None:
        """Ends the request because its client went away; `drain` raises CANCELLED."""
        self._interrupt(CancelReason.CLIENT, MillraceError(Reason.CANCELLED, "the client went away"))

    def end(self, error: MillraceError) -> None:
        """Ends the request from this side; `drain` raises `error`."""
        self._interrupt(CancelReason.CLIENT, error)

    def fall_behind(self) -> None:
        """Ends the request because its client does not read what is sent to it."""
        error = MillraceError(
            Reason.CANCELLED,
            "the client does not read its stream: more of it waits than gateway.request.max_unread or "
            "max_unread_of_tenant allow; read on while it comes, or ask for fewer log-probabilities",
        )
        self._interrupt(CancelReason.CLIENT, error)

    def first_chunk_written(self) -> None:
        """The face has handed the first chunk to its socket."""
        if self.meter.first_written_s is None:
            self.meter.first_written_s = time.monotonic()

    @property
    def _is_accounted(self) -> bool:
        """Whether what engines have computed is known."""
        return self.meter.has_worked

    @property
    def _num_prompt_tokens(self) -> int:
        return 0 if self._is_refunded else self.info.num_prompt_tokens

    @property
    def _num_cached_tokens(self) -> int:
        return self.meter.first_token.cached_prompt_tokens

    def usage(self) -> Usage:
        """Tokens so far; final once `drain` has returned nothing. Those of requests that were made for its
        answer are among them; each of these has a row of its own.
        """
        usage, others = self._own_usage(), self.stream.elsewhere
        if others is None:
            return usage
        return msgspec.structs.replace(
            usage,
            prompt_tokens=usage.prompt_tokens + others.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens + others.cached_prompt_tokens,
            completion_tokens=usage.completion_tokens + others.completion_tokens,
            reasoning_tokens=usage.reasoning_tokens + others.reasoning_tokens,
        )

    def _own_usage(self) -> Usage:
        meter = self.meter
        candidate_tokens = meter.statistics.candidate_tokens
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=0 if self._discard_tokens else meter.completion_tokens,
            candidate_tokens=0 if self._discard_tokens else candidate_tokens,
            cached_prompt_tokens=self._num_cached_tokens,
            reasoning_tokens=0
            if self._discard_tokens
            else sum(choice.text.num_reasoning_tokens for choice in self._choices.values()),
            ttft=meter.ttft(),
            tokens_per_s=meter.tokens_per_s,
            drafted_tokens=meter.statistics.drafted_tokens,
            accepted_tokens=meter.statistics.accepted_tokens,
            delayed_by_s=dict(meter.statistics.delayed_by_s),
            shared_with=self._books.shared_with(self) if meter.statistics.delayed_by_s else (),
            deliberated=self.stream.deliberated,
            kv_lost=self._kv_lost(),
        )

    def _kv_lost(self) -> float | None:
        asked, meter = self.call.request.retention, self.meter
        if asked is None or asked.max_lost is None:
            return None
        return min(1.0, meter.statistics.lost_tokens / max(1, meter.completion_tokens))

    def tool_calls(self) -> list[tuple[str, str]]:
        """(name, arguments' JSON text) of every call in the answers so far, as it came."""
        return [call for choice in self._choices.values() for call in choice.text.tool_calls()]

    async def refusal(self) -> MillraceError | None:
        """Waits until an engine works on the request, or refuses it; `drain` goes on from there."""
        if not self._first:
            try:
                self._first = await self.stream.take()
            except MillraceError as error:
                self._refused = error
        return self._refused

    async def let_go(self) -> None:
        """Gives back what a refused request holds; it is settled by `close`, or goes on elsewhere."""
        self.stream.cancel(CancelReason.CLIENT)
        await self._reservation.cancel()

    def supersede(self) -> None:
        """The call goes on elsewhere, under this one's entry in the ledger."""
        self._settled = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._books.supersede(self)

    async def drain(self) -> list[ChoiceDelta]:
        """Deltas of everything that has come, one per output; empty when all choices have ended.

        Raises the MillraceError that ended the request.
        """
        deltas: list[ChoiceDelta] = []
        if self._refused is not None:
            raise self._refused
        while self._open and not deltas:
            outputs, self._first = self._first or await self.stream.take(), ()
            budget = self._reservation.remaining_completion_budget()
            if budget is not None:
                budget = await self._pay(outputs, budget)
            now_s = time.monotonic()
            # Few have come, or the client was slow.
            slices = Slices() if len(outputs) > _IN_ONE_SLICE else None
            for number, output in enumerate(outputs, start=1):
                if slices is not None and number % _IN_ONE_SLICE == 0:
                    await slices.breathe()
                if output.choice_index not in self._open:
                    # It came with the end of its choice: how far an engine was ahead is not charged.
                    output.token_ids = []
                self.meter.count(output, now_s)
                delta = self._delta(output)
                if delta is not None:
                    deltas.append(delta)
            if budget is not None and self.meter.completion_tokens >= budget and self._open:
                await self._meet_budget(deltas)
            if self.kept_ids is not None:
                for delta in deltas:
                    self.kept_ids += delta.token_ids
            if self.judge is not None:
                await self.judge.see(deltas)
            if self.transcript is not None:
                self.transcript.add(deltas)
        self._note_progress()
        return deltas

    def _note_progress(self, outcome: str = "") -> None:
        """Before the next chunk leaves: a killed gateway's ledger has what it sent."""
        meter = self.meter
        candidate_tokens = meter.statistics.candidate_tokens + meter.withheld_tokens
        reason = self._finish_reason
        if not outcome and reason is not None and not self._open:
            outcome = reason.name.lower()
        self.entry.record(
            Progress(
                prompt_tokens=self._num_prompt_tokens,
                cached_prompt_tokens=self._num_cached_tokens,
                completion_tokens=0 if self._discard_tokens else meter.completion_tokens,
                candidate_tokens=0 if self._discard_tokens else candidate_tokens,
                outcome=outcome or INTERRUPTED,
            )
        )

    def _delta(self, output: EngineOutput) -> ChoiceDelta | None:
        if output.withheld_tokens:
            self._note_progress()
            return None
        if output.choice_index not in self._open:
            return None
        choice, reason = self._choices[output.choice_index], output.finish_reason
        check_ended(reason)
        if reason is FinishReason.LENGTH and self._reservation.is_short:
            # An engine that ranks answers got the length that is paid for as their limit.
            reason = output.finish_reason = FinishReason.BUDGET
        if self._discard_tokens:
            output.token_ids, output.logprobs = [], ()
        num_tokens = len(output.token_ids)
        delta = output.delta if isinstance(output, ReadOutput) else choice.feed(output)
        self.meter.completion_tokens -= num_tokens - len(output.token_ids)
        if output.prompt_logprobs:
            delta = delta or ChoiceDelta(index=choice.index)
            delta.prompt_logprobs = output.prompt_logprobs
        if delta is not None and delta.finish_reason is not None:
            if reason is None:
                self.stream.end_choice(choice.index, CancelReason.STOP_STRING)
            self._end(choice.index, delta.finish_reason)
        return delta

    def _end(self, index: int, reason: FinishReason) -> None:
        self._open.discard(index)
        self._finish_reason = self._finish_reason or reason

    async def _pay(self, outputs: Sequence[EngineOutput], budget: int) -> int:
        """Reserves what these outputs are beyond the budget, and returns the new one; takes out of them what
        nobody pays for. They come as many as the event loop was late.
        """
        needed = self.meter.completion_tokens + sum(len(output.token_ids) for output in outputs)
        while needed > budget:
            granted = await self._extend()
            if not granted:
                self._is_spent = True
                _cut(outputs, budget - self.meter.completion_tokens)
                break
            budget += granted
        return budget

    async def _extend(self) -> int:
        granted = await self._reservation.extend()
        if granted:
            self.entry.extended()
        return granted

    async def _meet_budget(self, deltas: list[ChoiceDelta]) -> None:
        if not self._is_spent and await self._extend():
            return
        self.stream.cancel(CancelReason.BUDGET)
        for index in sorted(self._open):
            deltas.append(self._choices[index].end(FinishReason.BUDGET))
            self._end(index, FinishReason.BUDGET)

    def _expire(self) -> None:
        self._interrupt(CancelReason.DEADLINE, _deadline_exceeded())

    def _interrupt(self, why: CancelReason, error: MillraceError) -> None:
        if self._open:
            self.stream.cancel(why)
            self.stream.interrupt(error)

    async def _settle(self, outcome: Outcome) -> None:
        if self._settled:
            return
        self._settled = True
        self.meter.withheld_tokens = 0
        if self._deadline is not None:
            self._deadline.cancel()
        self.stream.cancel(CancelReason.CLIENT)
        if self._is_accounted:
            await self._settle_now(outcome)
            return
        # It goes on whatever becomes of the caller, whose call may be cancelled a second time.
        self._settling = asyncio.create_task(self._settle_unstarted(outcome), name="settle")
        await asyncio.shield(self._settling)

    async def _settle_unstarted(self, outcome: Outcome) -> None:
        """Who is charged does not depend on who ended the request, or by which face: a prompt that was
        computed is paid for, or prefills would be free for those who leave before the first token.
        """
        computed = await self.stream.taken_back()
        self._take_in(computed)
        await self._settle_now(outcome)

    def _take_in(self, computed: Computed) -> None:
        self._is_refunded = not computed.has_begun
        self.meter.statistics.candidate_tokens += computed.num_tokens

    async def _settle_now(self, outcome: Outcome) -> None:
        usage = self._own_usage()
        self._note_progress(outcome.name)
        self._books.close(self, outcome, usage)
        try:
            if self._is_refunded:
                await self._reservation.cancel()
            else:
                await self._reservation.settle(
                    usage.prompt_tokens,
                    usage.billed_tokens,
                    cached_prompt_tokens=usage.cached_prompt_tokens,
                )
        finally:
            self.entry.settled()


def _cut(outputs: Sequence[EngineOutput], num_tokens: int) -> None:
    """Leaves so many tokens to the outputs, in their order; a choice that loses some has not ended."""
    shortened: set[int] = set()
    for output in outputs:
        if len(output.token_ids) > num_tokens:
            output.token_ids = output.token_ids[:num_tokens]
            output.logprobs = output.logprobs[:num_tokens]
            shortened.add(output.choice_index)
        if output.choice_index in shortened:
            output.finish_reason = None
        num_tokens -= len(output.token_ids)


def check_ended(reason: FinishReason | None) -> None:
    """Raises what an engine has ended a choice for, where that is no answer."""
    if reason is FinishReason.DEADLINE:
        raise _deadline_exceeded()
    if reason is FinishReason.CANCELLED:
        raise MillraceError(Reason.CANCELLED, "the engine was told to cancel the request")


def _deadline_exceeded() -> MillraceError:
    return MillraceError(
        Reason.DEADLINE_EXCEEDED, "the request's deadline passed; ask for less, or allow more time"
    )
