"""An answer whose prompt one engine computes, and which another one goes on with, where that pays.

The first engine draws the first token, which is sent at once, and holds the prompt's blocks under a ticket.
The answer then goes on as a continuation, on an engine that pulls them. Until the first token has come,
whatever goes wrong there leads to one engine that does all; after it, the engine that pulls computes what is
lacking. Either way one prompt is counted, once. See engine/runner/prefix_peers/DESIGN.md.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Any

import msgspec

from contract.engines import CancelReason
from contract.outputs import FinishReason
from gateway.engines.attachment import EngineReady, Leg, Lost
from gateway.engines.continuation import ContinuousStream, Stranded
from gateway.engines.fleet import Fleet
from gateway.engines.types import EngineOutput, Submission

_TICKET_BYTES = 16
# So much longer than expected, and so long at least, the first engine may take; then another one does all.
_PATIENCE, _LEAST_S = 3.0, 1.0


class SplitStream(ContinuousStream):
    """Outputs of one submission, over the engine that computes its prompt and the one that answers."""

    def __init__(self, fleet: Fleet, submission: Submission, **options: Any) -> None:
        super().__init__(fleet, submission, **options)
        # Who computes the prompt, until its first token has come or nobody waits for it; and who did, until
        # the answer goes on.
        self._computing: Leg | None = None
        self._computed: Leg | None = None
        self._ticket = b""
        self._late: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """See `ContinuousStream.start`."""
        self._submission = self._fleet.adapters.asked_for(self._submission)
        split = self._fleet.split(self._submission)
        if split is None:
            self._submit(self._submission, 0)
            return
        self._ticket = secrets.token_bytes(_TICKET_BYTES)
        # The ledger hears of the prompt from the engine that answers.
        asked = msgspec.structs.replace(self._submission, hand_over=self._ticket, entry_id="")
        self._computing = self._submit_to(split.route, asked, 0)
        limit_s = max(_LEAST_S, _PATIENCE * split.first_s)
        self._late = asyncio.get_running_loop().call_later(limit_s, self._is_late)

    def cancel(self, reason: CancelReason) -> None:
        """See `ContinuousStream.cancel`."""
        super().cancel(reason)
        if self._computing is not None or self._computed is not None:
            self._ends("cancelled")

    def _note(self, output: EngineOutput) -> None:
        leg, now = self._computing, time.monotonic()
        if leg is not None and output.finish_reason is FinishReason.LENGTH:
            output.finish_reason = None
            super()._note(output)
            self._legs.pop(leg)
            self._stop_waiting()
            self._computed, self.handed_over_s = leg, (now, now)
            self._stranded.append(Stranded(leg, 0, now, is_planned=True))
            return
        if leg is not None:
            # The first token was the last.
            self._ends("ended")
        elif self._computed is not None and self.handed_over_s is not None:
            self.handed_over_s = self.handed_over_s[0], now
            self._fleet.note_hand_over(len(self._submission.prompt_token_ids), now - self.handed_over_s[0])
            self._ends("handed_over")
        super()._note(output)

    def _note_loss(self, lost: Lost) -> None:
        if lost.leg is not self._computing:
            super()._note_loss(lost)
            return
        # Nothing was told yet: another one does all of it.
        self._give_up("lost" if lost.error is None else "refused")

    def _is_late(self) -> None:
        leg = self._computing
        # A token that waits to be taken has not come too late.
        if leg is not None and not leg.started:
            # Before its ticket is released: what has ended by then is held.
            leg.cancel(CancelReason.CLIENT)
            self._give_up("late")
            # `take` looks again.
            self._inbox.put_last(EngineReady())

    def _give_up(self, why: str) -> None:
        leg = self._computing
        assert leg is not None, "called while it computes"
        self._legs.pop(leg, None)
        self._ends(why)
        self._stranded.append(Stranded(leg, 0, time.monotonic(), is_planned=True))

    def _continuations(self, leg: Leg) -> list[Submission]:
        found = super()._continuations(leg)
        if leg is not self._computed:
            return found
        source = (leg.attachment.target, self._ticket)
        return [msgspec.structs.replace(each, source=source) for each in found]

    def _stop_waiting(self) -> None:
        self._computing = None
        if self._late is not None:
            self._late.cancel()

    def _ends(self, outcome: str) -> None:
        """The part of the engine that computes the prompt is over."""
        leg = self._computing or self._computed
        assert leg is not None, "called once"
        self._stop_waiting()
        self._computed, self.split = None, outcome
        leg.attachment.release(self._ticket)
