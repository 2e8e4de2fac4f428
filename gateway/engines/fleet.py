"""All engines of this deployment: who is attached, what they serve, and the choice among them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection, Sequence

from gateway.engines.attachment import Attachment
from gateway.engines.router import Candidate, RoutingWeights, choose
from gateway.engines.types import EngineState, Submission
from services.errors import MillraceError, Reason


class Fleet:
    """Attachments by target. `set_targets` may be called at any time: new engines join, others leave."""

    def __init__(self, *, gateway: str, fingerprint: str, weights: RoutingWeights | None = None) -> None:
        self._gateway = gateway
        self._fingerprint = fingerprint
        self._weights = weights or RoutingWeights()
        self._attachments: dict[str, Attachment] = {}
        self._choices = itertools.count(1)
        self._last_chosen: dict[str, int] = {}
        self._changed = asyncio.Event()

    @property
    def attachments(self) -> Collection[Attachment]:
        """Every engine that is wanted, attached or not."""
        return self._attachments.values()

    @property
    def ready(self) -> list[Attachment]:
        """Engines that take new requests."""
        return [each for each in self._attachments.values() if each.state is EngineState.READY]

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus completion that every attached engine takes; 0 when none is attached."""
        return min((each.info.max_model_len for each in self.attachments if each.info), default=0)

    async def set_targets(self, targets: Sequence[str]) -> None:
        """Attaches engines that are new in `targets` and lets go of those that are missing."""
        for target in targets:
            if target not in self._attachments:
                attachment = Attachment(
                    target,
                    gateway=self._gateway,
                    fingerprint=self._fingerprint,
                    on_change=self._note_change,
                )
                self._attachments[target] = attachment
                attachment.start()
        for target in [each for each in self._attachments if each not in targets]:
            await self._attachments.pop(target).stop()

    async def stop(self) -> None:
        """Closes every stream."""
        await self.set_targets([])

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits until some engine's state changes; False when none did in time."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def pick(self, submission: Submission, *, avoid: Collection[str] = ()) -> Attachment:
        """The engine for `submission`, one outside `avoid` where there is one; raises ENGINE_UNAVAILABLE."""
        ready = self.ready
        if not ready:
            raise self.unavailable()
        if avoid:
            ready = [each for each in ready if each.target not in avoid] or ready
        chosen = ready[0]
        if len(ready) > 1:
            tokens = len(submission.prompt_token_ids) + len(submission.output_token_ids)
            chosen = ready[choose([self._candidate(each) for each in ready], tokens, self._weights)]
        self._last_chosen[chosen.target] = next(self._choices)
        return chosen

    def _candidate(self, attachment: Attachment) -> Candidate:
        load = attachment.load
        used = load.num_total_blocks - load.num_free_blocks
        return Candidate(
            # The report is a step old and own submissions may be newer; other gateways' are only in the
            # report.
            pending_tokens=max(load.pending_prefill_tokens, attachment.unstarted_tokens),
            num_requests=max(load.num_running + load.num_waiting, attachment.num_open),
            kv_usage=used / load.num_total_blocks if load.num_total_blocks else 0.0,
            last_chosen=self._last_chosen.get(attachment.target, 0),
        )

    def _note_change(self, attachment: Attachment) -> None:
        self._changed.set()

    def unavailable(self) -> MillraceError:
        """ENGINE_UNAVAILABLE with the state of every engine."""
        states = ", ".join(
            f"{each.target} {each.state}" + (f" ({each.last_failure})" if each.last_failure else "")
            for each in self.attachments
        )
        return MillraceError(
            Reason.ENGINE_UNAVAILABLE,
            f"no engine takes requests now: {states or 'none is configured'}; try again",
            retry_after_s=1.0,
        )
