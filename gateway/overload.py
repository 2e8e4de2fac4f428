"""Who is refused when more is asked than engines can serve, and when they should come back.

Two promises decide. A tier's own: a request that would wait longer than `queue_limit_ms` is refused at once
instead of late. And the order among tiers: the more work waits, the higher the tier from which on requests
are still taken, so that a flood of the lowest tier cannot fill the queue that the others need. Nothing that
was accepted is dropped.

Waiting is estimated from what was measured: how fast engines compute prompts, and how fast waiting requests
are started. Work of higher and equal tiers counts as ahead, that of lower tiers does not: engines serve by
tier.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.config import AdmissionConfig
from gateway.tiers import Tier
from services.errors import MillraceError, Reason

# A hint below this would make clients come back into the same queue.
_MIN_RETRY_AFTER_S = 0.25
_TICK_S = 1e-6
# A rate is believed from this many starts on, with what is forgotten taken off.
_FEWEST_STARTS = 2.0


@dataclass(frozen=True, slots=True)
class EngineQueue:
    """What waits at one engine, by its own report and by what was submitted since."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    pending_prefill_tokens: int
    # Measured while prompts were computed; 0 before the first.
    prefill_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a new request has before it."""

    # Until it would be started, in seconds; 0 when nothing is known.
    wait_s: float
    # All work waiting, of every tier, in seconds at the measured rates.
    backlog_s: float
    # Requests that would be started before it, as this gateway sees it.
    position: int


class StartRate:
    """How many waiting requests are started a second, forgotten exponentially."""

    def __init__(self, memory_s: float, clock: Callable[[], float]) -> None:
        self._memory_s = memory_s
        self._clock = clock
        self._weight = 0.0
        self._measured_s = 0.0
        self._at_s = clock()

    def started(self) -> None:
        """Counts one start."""
        self._forget()
        self._weight += 1.0

    def per_s(self) -> float:
        """Starts a second; 0 while there is too little to tell."""
        self._forget()
        return self._weight / self._measured_s if self._weight >= _FEWEST_STARTS else 0.0

    def _forget(self) -> None:
        now_s = self._clock()
        # Starts in the same tick of the clock are a moment apart.
        passed_s, self._at_s = max(_TICK_S, now_s - self._at_s), now_s
        kept = math.exp(-passed_s / self._memory_s)
        self._weight *= kept
        # The time that the weights stand for; grows to the length of the memory.
        self._measured_s = self._measured_s * kept + self._memory_s * (1.0 - kept)


class Ticket:
    """One request on its way to its first token; to be ended exactly when it starts or fails."""

    def __init__(self, admission: Admission, priority: int) -> None:
        self._admission = admission
        self._priority = priority
        self._is_waiting = True

    def started(self) -> None:
        """The first output came."""
        if self._is_waiting:
            self._is_waiting = False
            self._admission.left(self._priority, started=True)

    def ended(self) -> None:
        """The request is over, with or without a start."""
        if self._is_waiting:
            self._is_waiting = False
            self._admission.left(self._priority, started=False)


class Admission:
    """Decides about each request by the state of the engines' queues."""

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
        self._rate = StartRate(config.rate_memory_s, clock)
        # Requests of this gateway that have not started, by priority.
        self._waiting: dict[int, int] = {}

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
                {"shed_at_ms": f"{sheds_at_s * 1000:.0f}"},
            )
        limit_ms = tier.config.queue_limit_ms
        if limit_ms is not None and estimate.wait_s * 1000 > limit_ms:
            raise _refusal(
                f"the request would wait {estimate.wait_s * 1000:.0f} ms; "
                f"tier {tier.name} allows {limit_ms} ms",
                estimate,
                estimate.wait_s - limit_ms / 1000,
                {"queue_limit_ms": str(limit_ms)},
            )
        return estimate

    def estimate(self, tier: Tier, prompt_tokens: int, queues: Sequence[EngineQueue]) -> Estimate:
        """What a request of this tier would have before it at the engine where it would start first."""
        all_waiting = sum(self._waiting.values())
        ahead = sum(number for priority, number in self._waiting.items() if priority >= tier.config.priority)
        share = ahead / all_waiting if all_waiting else 1.0
        # Engines know of other gateways' requests too; these are taken to be mixed as ours are.
        seen = max(all_waiting, sum(queue.num_waiting for queue in queues))
        position = round(seen * share)
        if any(_is_free(queue) for queue in queues):
            return Estimate(0.0, 0.0, position)
        prefill_s = min((_prefill_s(queue, share, prompt_tokens) for queue in queues), default=0.0)
        backlog_s = min((_prefill_s(queue, 1.0, 0) for queue in queues), default=0.0)
        starts_per_s = self._rate.per_s()
        if starts_per_s and all(_is_full(queue) for queue in queues):
            prefill_s = max(prefill_s, (position + 1) / starts_per_s)
            backlog_s = max(backlog_s, seen / starts_per_s)
        return Estimate(prefill_s, backlog_s, position)

    def enter(self, tier: Tier) -> Ticket:
        """Counts a request that goes to an engine now."""
        priority = tier.config.priority
        self._waiting[priority] = self._waiting.get(priority, 0) + 1
        return Ticket(self, priority)

    def left(self, priority: int, *, started: bool) -> None:
        """See Ticket."""
        self._waiting[priority] -= 1
        if started:
            self._rate.started()


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
            "expected_wait_ms": f"{estimate.wait_s * 1000:.0f}",
            "backlog_ms": f"{estimate.backlog_s * 1000:.0f}",
            "queue_position": str(estimate.position),
            **metadata,
        },
        retry_after_s=retry_after_s,
    )
