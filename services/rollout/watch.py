"""Watches one rollout until it is over: looks, decides, writes down. What it knows is in the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from gateway.applied import metrics_pages
from services.gate.cases import GateVerdict
from services.rollout.decision import RolloutAction, RolloutDecision, Situation, Why, decide
from services.rollout.figures import GatewayPage, Sides, read_page
from services.rollout.store import RolloutMoved, RolloutProgress, RolloutState, RolloutStore, StoredRollout

_log = logging.getLogger(__name__)
# A hold is written down when it has been the same for so many looks: what passes says nothing.
_LOOKS_OF_A_HOLD = 3
# How long gateways may take to follow the last decision.
_FOLLOW_LIMIT_S = 30.0
_SAME_SHARE = 1e-6

# Runs the suite; the verdict, and what it says.
SuiteRun = Callable[[StoredRollout], Awaitable[tuple[GateVerdict, str]]]
# Pages of all gateways by address.
Scrape = Callable[[Sides], Awaitable[dict[str, GatewayPage]]]
# Hears of every decision that is written down.
Tell = Callable[[StoredRollout, RolloutDecision], None]


def scraper(names: Sequence[str]) -> Scrape:
    """Reads the metrics of every gateway that one of `names` (host:port) resolves to, all at once."""

    def read(name: str, sides: Sides) -> dict[str, GatewayPage]:
        return {address: read_page(text, sides) for address, text in metrics_pages(name)}

    async def scrape(sides: Sides) -> dict[str, GatewayPage]:
        found = await asyncio.gather(*(asyncio.to_thread(read, name, sides) for name in names))
        return {address: page for pages in found for address, page in pages.items()}

    return scrape


class RolloutWatch:
    """One watcher of one rollout that runs. `run` until it is over."""

    def __init__(
        self,
        store: RolloutStore,
        rollout: StoredRollout,
        *,
        scrape: Scrape,
        watcher: str,
        run_suite: SuiteRun,
        tell: Tell,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._rollout, self._watcher = store, rollout, watcher
        self._scrape, self._run_suite, self._tell, self._clock = scrape, run_suite, tell, clock
        self._suite: asyncio.Task[tuple[GateVerdict, str]] | None = None
        # Since when no gateway has had an engine for the candidate.
        self._without_engine_since_s: float | None = None
        # The last hold, for how many looks, and the one that is written down.
        self._held: tuple[Why | None, int] = (None, 0)
        self._noted: Why | None = None

    async def run(self) -> StoredRollout:
        """Returns it when all gateways do what was decided last, or do not answer."""
        self._begin_suite()
        try:
            while self._rollout.state is RolloutState.RUNNING:
                try:
                    await self.look()
                except RolloutMoved:
                    await self._read_again()
                except SQLAlchemyError as error:
                    _log.error("rollouts: the database is away, nothing can be decided: %s", error)
                if self._rollout.state is RolloutState.RUNNING:
                    await asyncio.sleep(self._rollout.plan.interval_s)
        finally:
            if self._suite is not None:
                self._suite.cancel()
                await asyncio.wait({self._suite})
        await self._followed()
        return self._rollout

    async def look(self) -> None:
        """Looks once. Raises RolloutMoved where somebody else has decided meanwhile."""
        pages = await self._scrape(self._rollout.sides)
        progress = self._suite_progress(self._rollout.progress)
        progress = msgspec.structs.replace(progress, tally=progress.tally.after(pages))
        self._rollout = msgspec.structs.replace(self._rollout, progress=progress)
        decision = decide(self._rollout.plan, self._situation(pages))
        if decision.action is RolloutAction.HOLD:
            await self._hold(decision)
        else:
            await self._decide(decision)
            self._held, self._noted = (None, 0), None

    def _situation(self, pages: dict[str, GatewayPage]) -> Situation:
        rollout, now_s = self._rollout, self._clock()
        candidate, progress = rollout.sides.candidate, rollout.progress
        if not pages or any(page.engines.get(candidate) for page in pages.values()):
            self._without_engine_since_s = None
        elif self._without_engine_since_s is None:
            self._without_engine_since_s = now_s
        since_s = self._without_engine_since_s
        return Situation(
            step=rollout.step,
            seconds=now_s - rollout.step_unix_ms / 1000,
            counts=progress.tally.counts,
            num_gateways=len(pages),
            unfollowed=self._unfollowed(pages),
            # So that the first look at it is one, too.
            without_engine_s=0.0 if since_s is None else max(now_s - since_s, 1e-3),
            gate=GateVerdict(progress.gate) if progress.gate else GateVerdict.NOT_ENOUGH,
            gate_note=progress.gate_note or "its suite runs",
        )

    def _unfollowed(self, pages: dict[str, GatewayPage]) -> tuple[str, ...]:
        candidate, share = self._rollout.sides.candidate, self._rollout.share
        return tuple(
            address
            for address, page in pages.items()
            if abs(page.shares.get(candidate, -1.0) - share) > _SAME_SHARE
        )

    async def _hold(self, decision: RolloutDecision) -> None:
        why, looks = self._held
        self._held = (decision.why, looks + 1 if why is decision.why else 1)
        if self._held[1] == _LOOKS_OF_A_HOLD and self._noted is not decision.why:
            await self._decide(decision)
            self._noted = decision.why
        self._rollout = await asyncio.to_thread(self._store.beat, self._rollout, self._rollout.progress)

    async def _decide(self, decision: RolloutDecision) -> None:
        seen = self._rollout
        after = await asyncio.to_thread(self._store.decide, seen, decision, self._watcher)
        # A hold writes no progress; the beat that follows does.
        kept = after.progress if after.step != seen.step else seen.progress
        self._rollout = msgspec.structs.replace(after, progress=kept)
        self._tell(self._rollout, decision)

    async def _read_again(self) -> None:
        """Takes what somebody else has decided."""
        found = await asyncio.to_thread(self._store.read, self._rollout.id)
        if found.watcher != self._watcher:
            raise WatchedElsewhere(found.watcher)
        if found.step == self._rollout.step:
            found = msgspec.structs.replace(found, progress=self._rollout.progress)
        self._rollout, self._held, self._noted = found, (None, 0), None

    # --- the suite ---

    def _begin_suite(self) -> None:
        decided = (GateVerdict.WORSE, GateVerdict.NOT_WORSE)
        if self._rollout.plan.gate is not None and self._rollout.progress.gate not in decided:
            self._suite = asyncio.create_task(self._gate(), name="gate")

    async def _gate(self) -> tuple[GateVerdict, str]:
        began_s, traceparent = time.monotonic(), self._rollout.progress.traceparent
        verdict, note = await self._run_suite(self._rollout)
        self._store.traces.suite(traceparent, began_s, verdict, note)
        return verdict, note

    def _suite_progress(self, progress: RolloutProgress) -> RolloutProgress:
        if self._suite is None or not self._suite.done():
            return progress
        verdict, note = self._suite.result()
        self._suite = None
        return msgspec.structs.replace(progress, gate=verdict.value, gate_note=note)

    async def _followed(self) -> None:
        """Until every gateway that answers has the last share."""
        ends_s = time.monotonic() + _FOLLOW_LIMIT_S
        while waiting := self._unfollowed(await self._scrape(self._rollout.sides)):
            if time.monotonic() > ends_s:
                _log.error("rollouts: %s has another share than was decided", ", ".join(waiting))
                return
            await asyncio.sleep(min(self._rollout.plan.interval_s, 0.5))


class WatchedElsewhere(Exception):
    """Another watcher has taken the rollout over."""
