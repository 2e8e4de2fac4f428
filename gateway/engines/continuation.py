"""One request's outputs as one unbroken stream, over however many engines it takes.

When an engine is lost, every choice that has not ended is submitted to another one with its prompt, the
tokens so far and the same seed. The random stream and the grammar depend on these alone, so the
continuation is what the lost engine would have written.
"""

from __future__ import annotations

import time

import msgspec

from gateway.engines.attachment import Inbox, Leg, Lost
from gateway.engines.fleet import Fleet, Route
from gateway.engines.mailbox import Mailbox
from gateway.engines.types import CancelReason, EngineOutput, Submission
from services.errors import MillraceError, Reason

# Failures that another engine may not have.
_ELSEWHERE = frozenset({Reason.DRAINING, Reason.ENGINE_UNAVAILABLE, Reason.STEP_FAILED})


class ContinuationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.continuation]`: what is done when an engine is lost in the middle of a stream."""

    # Engines that one request may lose before it ends with ENGINE_LOST; 0 ends it with the first.
    max_losses: int = 3
    # How long to wait for an engine when none is attached.
    wait_s: float = 5.0


class ContinuousStream:
    """Outputs of one submission. `take` until every choice has ended or it raises; then `close`."""

    def __init__(self, fleet: Fleet, submission: Submission, config: ContinuationConfig) -> None:
        self._fleet = fleet
        self._submission = submission
        self._config = config
        self._inbox: Inbox = Mailbox()
        self._legs: dict[int, Leg] = {}
        # Choices that have not ended, with their tokens so far.
        self._tokens: dict[int, list[int]] = {
            index: []
            for index in range(submission.choice_index, submission.choice_index + submission.sampling.n)
        }
        self._lost_targets: list[str] = []
        # Moments, in monotonic seconds, at which an engine was lost and at which work went on.
        self.interruptions: list[tuple[float, float]] = []
        # How the first engine was chosen, and the target of the present one.
        self.route: Route | None = None
        self.engine = ""

    @property
    def num_losses(self) -> int:
        """Engines lost so far."""
        return len(self._lost_targets)

    def start(self) -> None:
        """Submits to the engine that routing picks; raises ENGINE_UNAVAILABLE when there is none."""
        self._submit(self._submission)

    async def take(self) -> list[EngineOutput]:
        """Outputs that have come, at least one. Raises ENGINE_LOST when continuing is not possible."""
        while True:
            outputs = []
            for item in await self._inbox.take():
                if isinstance(item, MillraceError):
                    raise item
                if isinstance(item, Lost):
                    if item.error is not None and not self._may_retry(item.error):
                        raise item.error
                    await self._resubmit(item)
                elif item.choice_index in self._tokens:
                    self._note(item)
                    outputs.append(item)
            if outputs:
                return outputs

    def interrupt(self, error: MillraceError) -> None:
        """Makes `take` raise `error` now."""
        self._inbox.put(error)

    def cancel(self, reason: CancelReason) -> None:
        """Takes everything back from the engines."""
        for leg in self._legs.values():
            leg.cancel(reason)
        self._legs.clear()

    def end_choice(self, index: int, reason: CancelReason) -> None:
        """Forgets one choice; cancels on the engine when it was the last one or has a leg of its own."""
        self._tokens.pop(index, None)
        if not self._tokens:
            self.cancel(reason)
            return
        for handle, leg in list(self._legs.items()):
            if leg.choice_index == index:
                leg.cancel(reason)
                del self._legs[handle]

    @property
    def _ranks_at_the_end(self) -> bool:
        sampling = self._submission.sampling
        return sampling.best_of > sampling.n or sampling.beam_width > 0

    def _note(self, output: EngineOutput) -> None:
        if output.finish_reason is not None:
            self._tokens.pop(output.choice_index, None)
        else:
            self._tokens[output.choice_index].extend(output.token_ids)

    def _may_retry(self, error: MillraceError) -> bool:
        others = [each for each in self._fleet.ready if each.target != self.engine]
        return error.reason in _ELSEWHERE and self.num_losses < self._config.max_losses and bool(others)

    def _submit(self, submission: Submission) -> None:
        route = self._fleet.pick(submission, avoid=self._lost_targets[-1:])
        self.route = self.route or route
        self.engine = route.attachment.target
        leg = route.attachment.submit(submission, self._inbox)
        self._legs[leg.handle] = leg

    async def _resubmit(self, lost: Lost) -> None:
        self._legs.pop(lost.handle, None)
        self._lost_targets.append(lost.engine)
        lost_s = time.monotonic()
        if self.num_losses > self._config.max_losses:
            raise self._lost(f"{self.num_losses} engines were lost under it")
        await self._wait_for_engine()
        open_elsewhere = {leg.choice_index for leg in self._legs.values()}
        self.interruptions.append((lost_s, time.monotonic()))
        if self._ranks_at_the_end:
            # Nothing was told yet, and which answers are the best depends on all of them.
            self._submit(self._submission)
            return
        for index, tokens in self._tokens.items():
            if index in open_elsewhere:
                continue
            self._submit(
                msgspec.structs.replace(
                    self._submission,
                    sampling=msgspec.structs.replace(
                        self._submission.sampling, n=1, best_of=1, prompt_logprobs=None
                    ),
                    choice_index=index,
                    output_token_ids=tuple(tokens),
                )
            )

    async def _wait_for_engine(self) -> None:
        end = time.monotonic() + self._config.wait_s
        while not self._fleet.ready:
            remaining = end - time.monotonic()
            if remaining <= 0:
                raise self._lost(f"no other engine was attached within {self._config.wait_s:g} s")
            await self._fleet.wait_change(remaining)

    def _lost(self, why: str) -> MillraceError:
        return MillraceError(
            Reason.ENGINE_LOST,
            f"the engine that served this request is gone and {why}; send the request again",
            metadata={"engines": ",".join(self._lost_targets)},
            retry_after_s=1.0,
        )
