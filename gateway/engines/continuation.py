"""One request's outputs as one unbroken stream, over however many engines it takes.

When an engine is lost, every choice that has not ended is submitted to another one with its prompt, the
tokens so far and the same seed. The random stream and the grammar depend on these alone, so the
continuation is what the lost engine would have written. It is computed with the same version of its adapter,
or ends with an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.engines import CancelReason
from contract.errors import MillraceError, Reason
from contract.outputs import EngineTime
from gateway.engines.attachment import LAST_WORD_LIMIT_S, Computed, EngineReady, Inbox, Leg, Lost
from gateway.engines.fleet import Fleet, Route
from gateway.engines.mailbox import Backlog, Mailbox
from gateway.engines.types import EngineOutput, Submission
from gateway.types.deliberation import Deliberated, TokensOfModel

# Failures that another engine may not have.
_ELSEWHERE = frozenset(
    {Reason.DRAINING, Reason.ENGINE_UNAVAILABLE, Reason.STEP_FAILED, Reason.MODEL_NOT_FOUND}
)


@dataclass(frozen=True, slots=True)
class Stranded:
    """Choices without an engine."""

    leg: Leg
    # Engines lost under them, this one included.
    num_losses: int
    lost_s: float
    # Nothing was lost: the engine has done its part.
    is_planned: bool = False


class ContinuousStream:
    """Outputs of one submission. `take` until every choice has ended or it raises; then `cancel`.

    `renew` signs the context again for a continuation: an accepted request is not refused for its wait, or
    for its age. `tell` puts an engine's refusal into the caller's terms.
    """

    # What became of a prompt given to another engine, in a word (hand_overs.SPLITS); "" where none was.
    # And the moments, in monotonic seconds, of its first token and of the answer's going on.
    split = ""
    handed_over_s: tuple[float, float] | None = None
    # What became of samples, where one was chosen among several.
    deliberated: Deliberated | None = None
    # What requests that were made for its answer have taken, all together.
    elsewhere: TokensOfModel | None = None

    def __init__(
        self,
        fleet: Fleet,
        submission: Submission,
        *,
        renew: Callable[[], Any] | None = None,
        tell: Callable[[MillraceError], MillraceError] = lambda error: error,
        backlog: Backlog | None = None,
    ) -> None:
        self._fleet = fleet
        self._submission = submission
        self._config = fleet.routing
        self._renew = renew
        self._tell = tell
        logprobs = submission.sampling.logprobs
        self._inbox: Inbox = Mailbox(backlog, 1 if logprobs is None else 2 + logprobs)
        # Open legs, with the number of engines that were lost before each.
        self._legs: dict[Leg, int] = {}
        # Choices that have not ended, with their tokens so far.
        self._tokens: dict[int, list[int]] = {
            index: list(submission.output_token_ids) for index in self._choices_of(submission)
        }
        # Something was told already, so that choices must be continued one by one.
        self._has_output = False
        self._stranded: list[Stranded] = []
        self._wait: asyncio.Task[None] | None = None
        # All legs there ever were.
        self._all_legs: list[Leg] = []
        # Connections that were lost, in order; several choices on one are one loss.
        self.losses: dict[tuple[str, int], None] = {}
        # Moments, in monotonic seconds, at which an engine was lost and at which work went on.
        self.interruptions: list[tuple[float, float]] = []
        # How the first engine was chosen; the target of the present one, and the pool that it names.
        self.route: Route | None = None
        self.engine = ""
        self.pool = ""

    @staticmethod
    def _choices_of(submission: Submission) -> Iterable[int]:
        first = submission.choice_index
        return range(first, first + submission.sampling.n)

    @property
    def model(self) -> str:
        """Version of the model that computes it."""
        return self._submission.model

    @property
    def seed(self) -> int:
        """By which tokens are drawn, on whatever engine."""
        return self._submission.sampling.seed

    @property
    def num_losses(self) -> int:
        """Engines lost so far."""
        return len(self.losses)

    def start(self) -> None:
        """Submits to the engine that routing picks; raises ENGINE_UNAVAILABLE when there is none, and
        MODEL_NOT_FOUND when there can be none with its adapter.
        """
        self._submission = self._fleet.adapters.asked_for(self._submission)
        self._submit(self._submission, 0)

    async def take(self) -> list[EngineOutput]:
        """Outputs that have come, at least one. Raises ENGINE_LOST when continuing is not possible."""
        while True:
            outputs = []
            for item in await self._inbox.take():
                if isinstance(item, EngineOutput):
                    if item.withheld_tokens:
                        outputs.append(item)
                    elif item.choice_index in self._tokens:
                        self._note(item)
                        outputs.append(item)
                elif isinstance(item, Lost):
                    self._note_loss(item)
                elif isinstance(item, EngineReady):
                    self._wait = None
                else:
                    raise item
            self._go_on()
            if outputs:
                return outputs

    def _go_on(self) -> None:
        """After what has come was noted."""
        if self._stranded:
            self._resume()

    def interrupt(self, error: MillraceError) -> None:
        """Makes `take` raise `error` now, also while it waits for an engine."""
        self._inbox.put_last(error)

    def when_full(self, call: Callable[[], None]) -> None:
        """Has `call` made when more outputs wait to be taken than may; they are dropped."""
        self._inbox.on_full = call

    def cancel(self, reason: CancelReason) -> None:
        """Takes everything back from the engines."""
        self._inbox.close()
        for leg in self._legs:
            leg.cancel(reason)
        self._legs.clear()
        self._stranded.clear()
        if self._wait is not None:
            self._wait.cancel()

    async def taken_back(self) -> Computed:
        """What engines had computed of what `cancel` took back before an output of it came: the tokens are
        those of candidates and beams; of an answer that is told as it is made, they were on their way.

        Nothing, of an engine that has not said so after ten seconds.
        """
        unheard = self.unheard()
        if unheard:
            await asyncio.wait(unheard, timeout=LAST_WORD_LIMIT_S)
        told = [leg.computed for leg in self._all_legs if leg.worked is not None]
        is_ranked = self._submission.sampling.ranks_at_the_end
        return Computed(
            has_begun=any(each.has_begun for each in told),
            num_tokens=sum(each.num_tokens for each in told) if is_ranked else 0,
            texts=set().union(*(each.texts for each in told)),
        )

    def when_told(self) -> asyncio.Task[Any] | None:
        """Done when engines have said all of what was taken back, and after ten seconds in any case; None
        where they have.
        """
        unheard = self.unheard()
        if not unheard:
            return None
        return asyncio.create_task(asyncio.wait(unheard, timeout=LAST_WORD_LIMIT_S), name="last word")

    @property
    def engine_time(self) -> EngineTime:
        """What engines have spent on it, as far as they have said so; one that was lost says nothing."""
        spent = EngineTime()
        for leg in self._all_legs:
            spent += leg.engine_time
        return spent

    @property
    def num_generated(self) -> int:
        """Tokens that engines have generated for it, taken or not, as far as they have said so."""
        return sum(leg.num_generated for leg in self._all_legs)

    def unheard(self) -> list[asyncio.Future[None]]:
        """Resolved when engines have said their last word of what was taken back."""
        worked = (leg.worked for leg in self._all_legs)
        return [each for each in worked if each is not None and not each.done()]

    def end_choice(self, index: int, reason: CancelReason) -> None:
        """Forgets one choice; cancels on the engine when it was the last one or has a leg of its own."""
        self._tokens.pop(index, None)
        if not self._tokens:
            self.cancel(reason)
            return
        for leg in list(self._legs):
            if leg.choice_index == index:
                leg.cancel(reason)
                del self._legs[leg]

    def _note(self, output: EngineOutput) -> None:
        self._has_output = True
        if output.finish_reason is not None:
            before = self._tokens.pop(output.choice_index, ())
            self._fleet.note_ended(self._submission, len(before) + len(output.token_ids))
        else:
            self._tokens[output.choice_index].extend(output.token_ids)

    def _note_loss(self, lost: Lost) -> None:
        leg = lost.leg
        num_before = self._legs.pop(leg, None)
        if num_before is None:
            # Taken back before the news came.
            return
        if lost.error is not None and not self._may_retry(lost.error, num_before):
            raise self._told(lost.error, lost.choice_index)
        self.losses[leg.attachment.target, leg.connection] = None
        num_losses = num_before + 1
        if num_losses > self._config.max_continuations:
            raise self._lost(f"{num_losses} engines were lost under it")
        self._stranded.append(Stranded(leg, num_losses, time.monotonic()))

    def _may_retry(self, error: MillraceError, num_losses: int) -> bool:
        takers = self._fleet.takers(self._submission)
        others = [each for each in takers if each.target != self.engine]
        return error.reason in _ELSEWHERE and num_losses < self._config.max_continuations and bool(others)

    def _submit(self, submission: Submission, num_losses: int) -> Leg:
        last_lost = next(reversed(self.losses), None)
        route = self._fleet.pick(submission, avoid=() if last_lost is None else last_lost[:1])
        return self._submit_to(route, submission, num_losses)

    def _submit_to(self, route: Route, submission: Submission, num_losses: int) -> Leg:
        self.route = self.route or route
        self.engine = route.attachment.target
        info = route.attachment.info
        self.pool = info.pool if info is not None else ""
        leg = route.attachment.submit(submission, self._inbox, cached_tokens=route.prefix_tokens)
        self._legs[leg] = num_losses
        self._all_legs.append(leg)
        return leg

    def _told(self, error: MillraceError, choice_index: int) -> MillraceError:
        return self._tell(error)

    def _resume(self) -> None:
        """Submits what has no engine, or sees to it that this is tried again when there is one."""
        if not self._has_output:
            self._submission = self._fleet.adapters.asked_for(self._submission)
        if not self._fleet.takers(self._submission):
            if refusal := self._fleet.adapters.refusal(self._submission):
                raise refusal
            self._await_engine()
            return
        stranded, self._stranded = self._stranded, []
        for each in stranded:
            if not each.is_planned:
                self.interruptions.append((each.lost_s, time.monotonic()))
            for submission in self._continuations(each.leg):
                self._submit(submission, each.num_losses)

    def _renewed(self) -> Submission:
        if self._renew is None:
            return self._submission
        return msgspec.structs.replace(self._submission, context=self._renew())

    def _continuations(self, leg: Leg) -> list[Submission]:
        """What a lost leg had not ended."""
        whole = self._renewed()
        if not self._has_output or self._submission.sampling.ranks_at_the_end:
            # Nothing was told yet; and which answers are the best depends on all of them.
            return [whole]
        first = msgspec.structs.replace(whole.sampling, n=1, best_of=1)
        alone = msgspec.structs.replace(first, prompt_logprobs=None)
        return [
            msgspec.structs.replace(
                whole,
                # The first choice's first output tells about the prompt; others may have begun before it.
                sampling=alone if tokens or index != whole.choice_index else first,
                choice_index=index,
                output_token_ids=tuple(tokens),
            )
            for index, tokens in self._tokens.items()
            if leg.choice_index in (None, index)
        ]

    def _await_engine(self) -> None:
        if self._wait is None:
            self._wait = asyncio.create_task(self._wait_for_engine(), name="wait for an engine")

    async def _wait_for_engine(self) -> None:
        end = time.monotonic() + self._config.continuation_wait_s
        while not self._fleet.takers(self._submission):
            remaining = end - time.monotonic()
            if remaining <= 0:
                self._inbox.put_last(
                    self._lost(f"no other engine was attached within {self._config.continuation_wait_s:g} s")
                )
                return
            await self._fleet.wait_change(remaining)
        self._inbox.put_last(EngineReady())

    def _lost(self, why: str) -> MillraceError:
        return MillraceError(
            Reason.ENGINE_LOST,
            f"the engine that served this request is gone and {why}; send the request again",
            metadata={"engines": ",".join(target for target, _ in self.losses)},
            retry_after_s=1.0,
        )
