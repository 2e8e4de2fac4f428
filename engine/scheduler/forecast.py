"""How long a new request would wait, decided once: when it is submitted.

Whoever is accepted is kept until it is served, however long that takes; so the refusal must come here, and
must foresee what a tier's queue limit forbids. Three things hold a request up:

- places: those ahead of it need places in the batch, which come free at a measured rate. Higher tiers that
  arrive later go first, so their rate of arrival is taken off. Inside the tier, other tenants are ahead of it
  with what fairness gives them, not with everything that they have submitted.
- prompts: tokens to compute before its own, at the rate of steps whose budget was used up.
- nothing at all, when places and blocks are free or can be taken from lower tiers.

While little was measured, as many requests may wait as the batch has places.
"""

from __future__ import annotations

import math

from engine.scheduler.queue import WaitingQueue
from engine.scheduler.state import SchedulerState
from engine.types import Request


class WaitForecast:
    """Predicts waits from the state of an engine."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def expected_wait_s(self, request: Request, now: float) -> float:
        """Seconds until the request would start; 0 is at once, inf is not as long as things stay so."""
        state = self._state
        num_places = max(request.sampling.beam_width, request.sampling.best_of, 1)
        ahead = state.waiting.at_or_above(request.priority)
        if self._is_free(request, ahead.num_places + num_places, ahead.num_tokens):
            return 0.0
        in_line = self._places_before(request, state.waiting) + num_places
        wait_s = self._wait_for_places_s(request.priority, in_line, now)
        if state.speed.full_prefill_tokens_per_s:
            wait_s = max(wait_s, ahead.num_tokens / state.speed.full_prefill_tokens_per_s)
        return wait_s

    def _is_free(self, request: Request, num_places: int, tokens_ahead: int) -> bool:
        """Whether everybody ahead and the request fit into the batch, lower tiers making room."""
        state = self._state
        lower = [each for each in state.running if each.priority < request.priority and not each.boosted]
        if num_places > state.config.max_num_seqs - len(state.running) + len(lower):
            return False
        tokens = tokens_ahead + len(request.prompt_token_ids) + len(request.output_token_ids)
        # Every sequence may leave a block half empty, and needs one more to grow.
        needed = state.cache.blocks_for(tokens) + 2 * num_places
        reserved = state.num_reserved_blocks()
        return needed <= state.cache.num_available - reserved + sum(each.table.num_held for each in lower)

    @staticmethod
    def _places_before(request: Request, waiting: WaitingQueue) -> int:
        """Places that are taken before the request's: all of higher tiers, and the fair part of its own."""
        lines = waiting.accounts_of(request.priority)
        own = lines.pop(request.tenant).num_places if request.tenant in lines else 0
        before = waiting.at_or_above(request.priority + 1).num_places + own
        for line in lines.values():
            fair = math.ceil((own + 1) * line.weight / request.weight)
            before += min(line.num_places, fair)
        return before

    def _wait_for_places_s(self, priority: int, in_line: int, now: float) -> float:
        state = self._state
        if not state.turnover.is_known and in_line <= 2 * state.config.max_num_seqs - len(state.running):
            return 0.0
        # More of them may come than lately did; a place promised twice is worse than one left over.
        higher = sum(
            rate.per_s(now, deviations=1.0) for each, rate in state.arrivals.items() if each > priority
        )
        left = state.turnover.per_s(now) - higher
        return in_line / left if left > 0 else math.inf
