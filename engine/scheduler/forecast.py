"""How long a new request would wait, decided once: when it is submitted.

Whoever is accepted is kept until it is served, however long that takes; so the refusal must come here, and
must foresee what a tier's limit forbids. Three things hold a request up:

- places: those ahead of it need places in the batch, which come free at a measured rate, or, if none did
  lately, when running answers reach the usual length. Higher tiers that arrive later go first, so their rate
  of arrival is taken off.
- prompts: tokens to compute before its own, at the rate of steps whose budget was used up. What is cached,
  or is computed for somebody ahead, is not counted a second time.
- nothing at all, when places and blocks are free or can be taken from lower tiers and from tenants that hold
  more than their share.

Inside the tier, other tenants are ahead with what fairness gives them, not with everything that they have
submitted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from engine.scheduler.queue import Line, account_of
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import SchedulerState

# Longest answer that is assumed before any has ended, in tokens.
_UNKNOWN_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request has before it, in seconds."""

    # Until something of it is computed; inf is not as long as higher tiers come as they do.
    wait_s: float
    # Then, until its prompt is computed.
    prompt_s: float
    # Between requests of its tenant and tier that were accepted lately; inf if none were.
    interval_s: float
    # The batch has places, or no other tenant of the tier was refused that was accepted less.
    is_its_turn: bool


class WaitForecast:
    """Predicts waits from the state of an engine."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def of(self, sequence: Sequence, now: float) -> Forecast:
        """What the first sequence of a new request would have before it."""
        state = self._state
        num_tokens = state.tokens_to_compute(sequence)
        ahead = self._ahead(sequence, num_tokens)
        wait_s = 0.0
        if not self._is_free(sequence, ahead, num_tokens):
            wait_s = self._wait_for_places_s(sequence.priority, ahead.num_places + sequence.num_places, now)
        running = sum(each.remaining_prefill for each in state.running if each.priority >= sequence.priority)
        seconds_for = state.speed.seconds_for
        accepted = state.accepted.get(account_of(sequence))
        has_places = len(state.running) < state.config.max_num_seqs
        return Forecast(
            wait_s=max(wait_s, seconds_for(ahead.num_tokens + running)),
            prompt_s=seconds_for(num_tokens),
            is_its_turn=has_places or state.turns.comes_to(account_of(sequence), now),
            interval_s=1 / rate
            if accepted and (rate := accepted.per_s(now)) and accepted.is_fresh
            else math.inf,
        )

    def _ahead(self, sequence: Sequence, num_tokens: int) -> Line:
        """What is served before the request: all of higher tiers, and the fair part of its own."""
        waiting, request = self._state.waiting, sequence.group.request
        lines = waiting.accounts_of(request.priority)
        own = lines.pop(request.tenant, Line())
        higher = waiting.at_or_above(request.priority + 1)
        places, tokens = higher.num_places + own.num_places, higher.num_tokens + own.num_tokens
        for line in lines.values():
            ratio = line.weight / request.weight
            places += min(line.num_places, math.ceil((own.num_places + 1) * ratio))
            tokens += min(line.num_tokens, math.ceil((own.num_tokens + num_tokens) * ratio))
        return Line(num_places=places, num_tokens=tokens)

    def _is_free(self, sequence: Sequence, ahead: Line, num_tokens: int) -> bool:
        """Whether everybody ahead and the request fit into the batch, others making room."""
        state, num_places = self._state, ahead.num_places + sequence.num_places
        lower = [each for each in state.running if each.priority < sequence.priority and not each.boosted]
        free = state.config.max_num_seqs - len(state.running) + len(lower)
        if num_places > free + self._spare_places(sequence):
            return False
        # Every sequence may leave a block half empty, and needs one more to grow.
        needed = state.cache.blocks_for(ahead.num_tokens + num_tokens) + 2 * num_places
        reserved = state.num_reserved_blocks()
        return needed <= state.cache.num_available - reserved + sum(each.table.num_held for each in lower)

    def _spare_places(self, sequence: Sequence) -> int:
        state, account = self._state, account_of(sequence)
        return sum(
            state.places.spare(holder, account, sequence.group.request.weight)
            for holder in state.places.holders(sequence.priority)
            if holder != account and state.counters.band(account) <= state.counters.band(holder)
        )

    def _wait_for_places_s(self, priority: int, in_line: int, now: float) -> float:
        state = self._state
        # More of them may come than lately did; a place promised twice is worse than one left over.
        higher = sum(
            rate.per_s(now, deviations=1.0) for each, rate in state.arrivals.items() if each > priority
        )
        turnover, step_s = state.turnover.per_s(now), state.speed.step_s
        if not state.turnover.is_known or not state.turnover.is_fresh:
            if not step_s:
                # Nothing was measured: as many may wait as there are places.
                return 0.0 if in_line <= 2 * state.config.max_num_seqs - len(state.running) else math.inf
            if not higher:
                return self._by_length(in_line) * step_s
            turnover = state.config.max_num_seqs / (self._usual_tokens() * step_s)
        return in_line / (turnover - higher) if turnover > higher else math.inf

    def _usual_tokens(self) -> float:
        """Length of an answer, as those that ended had it."""
        state = self._state
        limits = [each.max_tokens_total - each.num_prompt_tokens for each in state.running]
        return state.speed.answer_tokens or min(_UNKNOWN_ANSWER_TOKENS, max(limits, default=1))

    def _by_length(self, in_line: int) -> float:
        """Steps until so many places are free, if running answers become as long as others did."""
        state, usual = self._state, self._usual_tokens()
        num_free = state.config.max_num_seqs - len(state.running)
        left = [0.0] * num_free + sorted(
            min(each.max_tokens_total - each.num_known, max(usual - each.num_output_tokens, usual / 8))
            for each in state.running
        )
        rounds, place = divmod(in_line - 1, len(left))
        return rounds * usual + left[place]
