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
from collections.abc import Mapping
from dataclasses import dataclass

from engine.scheduler.queue import Line, account_of
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import SchedulerState

# Longest answer that is assumed before any has ended, in tokens.
_UNKNOWN_ANSWER_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request has before it, in seconds."""

    # Until something of it is computed, if higher tiers come as they may; inf is not as long as they do.
    wait_s: float
    # The same if they come as they did on average, and for no longer than they have come.
    usual_wait_s: float
    # The same at the pace at which its tier gets places, where that is the shorter: what a refusal tells.
    told_wait_s: float
    # Then, until its prompt is computed.
    prompt_s: float
    # How long those take who were told to come back later and go before it.
    line_s: float
    # It was told to come now.
    is_back: bool
    # Its tenant was accepted more than another one that is refused.
    leads: bool
    # Hash of its prompt, by which it is known when it comes back.
    prompt: int
    # Tokens of each place that it takes, by weight, as far as they can be foreseen.
    weighted_tokens: float


class WaitForecast:
    """Predicts waits from the state of an engine."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def of(self, sequence: Sequence, now: float) -> Forecast:
        """What the first sequence of a new request would have before it."""
        state, account = self._state, account_of(sequence)
        prompt = hash(sequence.group.request.prompt_token_ids)
        is_back = state.turns.is_back(account, prompt, now)
        num_tokens = state.tokens_to_compute(sequence)
        ahead, wait_s, usual_wait_s, in_line = self._ahead(sequence, num_tokens, {}), 0.0, 0.0, 1
        if not self._is_free(sequence, ahead, num_tokens):
            coming = {} if is_back else state.turns.open_places(sequence.priority, now)
            in_line = self._ahead(sequence, num_tokens, coming).num_places + sequence.num_places
            wait_s, usual_wait_s = self._wait_for_places_s(sequence.priority, in_line, now)
            if is_back:
                # What was promised is not taken back for what may come.
                wait_s = usual_wait_s
        running = sum(each.remaining_prefill for each in state.running if each.priority >= sequence.priority)
        prompts_s = state.speed.seconds_for(ahead.num_tokens + running)
        # The tier's own pace is known better than the difference of what comes free and what others take.
        told_wait_s = min(usual_wait_s, state.turns.wait_s(sequence.priority, in_line, now, usual_wait_s))
        interval_s = self._interval_s(sequence, usual_wait_s / in_line)
        weighted_tokens = self._weighted_tokens(sequence)
        return Forecast(
            wait_s=max(wait_s, prompts_s),
            usual_wait_s=max(usual_wait_s, prompts_s),
            told_wait_s=max(told_wait_s, prompts_s),
            prompt_s=state.speed.seconds_for(num_tokens),
            line_s=state.turns.line_s(account, prompt, weighted_tokens, now, interval_s),
            is_back=is_back,
            leads=state.turns.leads(account, weighted_tokens),
            prompt=prompt,
            weighted_tokens=weighted_tokens,
        )

    def _weighted_tokens(self, sequence: Sequence) -> float:
        request = sequence.group.request
        answer = min(request.sampling.max_tokens, self._state.speed.answer_tokens or math.inf)
        return (len(request.prompt_token_ids) / sequence.num_places + answer) / request.weight

    def _ahead(self, sequence: Sequence, num_tokens: int, coming: Mapping[str, float]) -> Line:
        """What is served before the request: all of higher tiers, and the fair part of its own; `coming` has
        the requests of its tier, by tenant, that are expected back.
        """
        waiting, request = self._state.waiting, sequence.group.request
        lines = waiting.accounts_of(request.priority)
        own = lines.pop(request.tenant, Line())
        higher = waiting.at_or_above(request.priority + 1)
        num_own = own.num_places + coming.get(request.tenant, 0.0)
        places, tokens = higher.num_places + num_own, higher.num_tokens + own.num_tokens
        for tenant in {*lines, *coming} - {request.tenant}:
            line = lines.get(tenant, Line(weight=request.weight))
            ratio = line.weight / request.weight
            places += min(line.num_places + coming.get(tenant, 0.0), math.ceil((num_own + 1) * ratio))
            tokens += min(line.num_tokens, math.ceil((own.num_tokens + num_tokens) * ratio))
        return Line(num_places=math.ceil(places), num_tokens=tokens)

    def _interval_s(self, sequence: Sequence, place_s: float) -> float:
        """Time between two requests of the tenant, if each place takes so long, shared with who is there."""
        request = sequence.group.request
        lines = self._state.waiting.accounts_of(request.priority)
        others = sum(line.weight for tenant, line in lines.items() if tenant != request.tenant)
        return place_s * (1 + others / request.weight)

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

    def _wait_for_places_s(self, priority: int, in_line: int, now: float) -> tuple[float, float]:
        """Until so many places came free, if higher tiers come as they may, and as they usually do."""
        state = self._state
        rates = [rate for each, rate in state.arrivals.items() if each > priority]
        # More of them may come than lately did; a place promised twice is worse than one left over.
        higher = sum(rate.per_s(now, deviations=1.0) for rate in rates)
        usual_higher = sum(rate.per_s(now) for rate in rates)
        turnover, step_s = state.turnover.per_s(now), state.speed.step_s
        if not state.turnover.is_known or not state.turnover.is_fresh:
            if not step_s:
                # Nothing was measured: as many may wait as there are places.
                few = in_line <= 2 * state.config.max_num_seqs - len(state.running)
                return (0.0, 0.0) if few else (math.inf, math.inf)
            if not higher:
                return (self._by_length(in_line) * step_s,) * 2
            turnover = state.config.max_num_seqs / (self._usual_tokens() * step_s)
        wait_s = in_line / (turnover - higher) if turnover > higher else math.inf
        usual_s = in_line / (turnover - usual_higher) if turnover > usual_higher else math.inf
        # What has come for a while comes for as long again: a burst is no stream without end.
        burst = sum(rate.per_s(now) * rate.lasted_s() for rate in rates)
        return wait_s, min(usual_s, (in_line + burst) / turnover)

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
