"""Who is refused when more is asked than engines can serve, and when they should come back.

Two promises decide. A tier's own: a request that would wait longer than `queue_limit_ms` is refused at once
instead of late. And the order among tiers: the more work waits, the higher the tier from which on requests
are still taken, so that a flood of the lowest tier cannot fill the queue that the others need. Nothing that
was accepted is dropped.

Waiting is estimated from what was measured: how fast engines compute prompts, and how fast requests that
waited were started, for each tier apart: what a tier gets is what higher ones leave over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from contract.errors import MillraceError, Reason
from gateway.config import AdmissionConfig
from gateway.tiers import Tier

# A hint below this would make clients come back into the same queue.
_MIN_RETRY_AFTER_S = 0.25


class EngineQueue(msgspec.Struct, frozen=True):
    """What waits at one engine, by its own report and by what was submitted since."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    pending_prefill_tokens: int
    # Measured while prompts were computed; 0 before the first.
    prefill_tokens_per_s: float


class Estimate(msgspec.Struct, frozen=True):
    """What a new request has before it."""

    # Until it would be started, in seconds; 0 when nothing is known.
    wait_s: float
    # All work waiting, of every tier, in seconds at the measured rates.
    backlog_s: float
    # Requests that would be started before it, as this gateway sees it.
    position: int


class WaitingLine:
    """Requests that wait for their first token, and how fast they get it.

    The pace is starts per second of the time during which somebody waited: an idle hour says nothing about
    it, and for a tier it is what the higher ones leave over. It is forgotten exponentially in that same time.
    """

    def __init__(self, memory_s: float, clock: Callable[[], float]) -> None:
        self.num_waiting = 0
        self._memory_s = memory_s
        self._clock = clock
        self._starts = 0.0
        self._waited_s = 0.0
        self._at_s = clock()

    def enter(self) -> None:
        """One more waits."""
        self._pass()
        self.num_waiting += 1

    def leave(self, *, started: bool) -> None:
        """One less waits."""
        self._pass()
        self.num_waiting -= 1
        if started:
            self._starts += 1.0

    def wait_s(self, num_starts: int) -> float:
        """Time in which so many are started; 0 while nobody ever waited.

        One start is added to those seen, so that a line that stands still is slow and not infinitely so.
        """
        self._pass()
        return num_starts * self._waited_s / (self._starts + 1.0)

    def _pass(self) -> None:
        now_s = self._clock()
        passed_s, self._at_s = now_s - self._at_s, now_s
        if self.num_waiting:
            kept = math.exp(-passed_s / self._memory_s)
            self._starts *= kept
            # Grows to the length of the memory.
            self._waited_s = self._waited_s * kept + self._memory_s * (1.0 - kept)


class Ticket:
    """One request on its way to its first token; to be ended exactly when it starts or fails."""

    def __init__(self, lines: Sequence[WaitingLine]) -> None:
        self._lines = lines
        self._is_waiting = True
        for line in lines:
            line.enter()

    def started(self) -> None:
        """The first output came."""
        self._leave(started=True)

    def ended(self) -> None:
        """The request is over, with or without a start."""
        self._leave(started=False)

    def _leave(self, *, started: bool) -> None:
        if self._is_waiting:
            self._is_waiting = False
            for line in self._lines:
                line.leave(started=started)


class Admission:
    """Decides about each request by the state of the engines' queues and of this gateway's own lines."""

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        config: AdmissionConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        ranks = sorted({tier.config.shed_rank for tier in tiers.values()})
        # Seconds of waiting work from which on requests of a rank are refused.
        self._sheds_at_s = {
            rank: config.max_backlog_s * (number + 1) / len(ranks) for number, rank in enumerate(ranks)
        }
        self._all = WaitingLine(config.rate_memory_s, clock)
        self._by_priority = {
            tier.config.priority: WaitingLine(config.rate_memory_s, clock) for tier in tiers.values()
        }

    def admit(self, tier: Tier, prompt_tokens: int, queues: Sequence[EngineQueue]) -> Estimate:
        """The estimate for a request that may go on; raises QUEUE_LIMIT_EXCEEDED otherwise."""
        estimate = self.estimate(tier, prompt_tokens, queues)
        sheds_at_s = self._sheds_at_s[tier.config.shed_rank]
        if estimate.backlog_s > sheds_at_s:
            raise _refusal(
                f"work for {estimate.backlog_s:.1f} s is waiting and tier {tier.name} is not taken beyond "
                f"{sheds_at_s:.1f} s",
                estimate,
                estimate.backlog_s - sheds_at_s,
                {"shed_at_s": f"{sheds_at_s:.3f}"},
            )
        limit_ms = tier.config.queue_limit_ms
        if limit_ms is not None and estimate.wait_s * 1000 > limit_ms:
            raise _refusal(
                f"the request would wait {estimate.wait_s * 1000:.0f} ms; "
                f"tier {tier.name} allows {limit_ms} ms",
                estimate,
                estimate.wait_s - limit_ms / 1000,
                {"queue_limit_s": f"{limit_ms / 1000:.3f}"},
            )
        return estimate

    def estimate(self, tier: Tier, prompt_tokens: int, queues: Sequence[EngineQueue]) -> Estimate:
        """What a request of this tier would have before it at the engine where it would start first."""
        own = self._by_priority[tier.config.priority]
        higher = sum(
            line.num_waiting
            for priority, line in self._by_priority.items()
            if priority > tier.config.priority
        )
        position = higher + own.num_waiting
        if any(_is_free(queue) for queue in queues):
            return Estimate(0.0, 0.0, position)
        share = position / self._all.num_waiting if self._all.num_waiting else 1.0
        wait_s = min((_prefill_s(queue, share, prompt_tokens) for queue in queues), default=0.0)
        backlog_s = min((_prefill_s(queue, 1.0, 0) for queue in queues), default=0.0)
        return Estimate(
            wait_s=max(wait_s, own.wait_s(own.num_waiting + 1), self._all.wait_s(higher)),
            backlog_s=max(backlog_s, self._all.wait_s(self._all.num_waiting)),
            position=position,
        )

    def enter(self, tier: Tier) -> Ticket:
        """Counts a request that goes to an engine now."""
        return Ticket((self._all, self._by_priority[tier.config.priority]))


def _is_free(queue: EngineQueue) -> bool:
    return not queue.num_waiting and not queue.pending_prefill_tokens and not _is_full(queue)


def _is_full(queue: EngineQueue) -> bool:
    return queue.num_running >= queue.max_num_seqs


def _prefill_s(queue: EngineQueue, share: float, prompt_tokens: int) -> float:
    if not queue.prefill_tokens_per_s:
        return 0.0
    return (queue.pending_prefill_tokens * share + prompt_tokens) / queue.prefill_tokens_per_s


def _refusal(message: str, estimate: Estimate, excess_s: float, metadata: Mapping[str, str]) -> MillraceError:
    retry_after_s = max(_MIN_RETRY_AFTER_S, excess_s)
    return MillraceError(
        Reason.QUEUE_LIMIT_EXCEEDED,
        f"{message}: try again in {retry_after_s:.1f} s",
        metadata={
            "expected_wait_s": f"{estimate.wait_s:.3f}",
            "backlog_s": f"{estimate.backlog_s:.3f}",
            "queue_position": str(estimate.position),
            **metadata,
        },
        retry_after_s=retry_after_s,
    )
