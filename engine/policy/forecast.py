"""How long a new request would wait, decided once: when it is submitted.

Whoever is accepted is kept until it is served, however long that takes; so the refusal must come here, and
must foresee what a tier's limit forbids. Slots come free at a measured rate or, if none did lately, when
running answers reach the usual length; those of higher tiers that arrive later are taken off. What is cached,
or is computed for somebody ahead, is not counted a second time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.policy.line import Line, Part, account_of, slots_of
from engine.policy.rates import StepRate, Traffic
from engine.policy.shares import Holder, Shares
from engine.policy.tickets import Tickets
from engine.types import Request

# Longest answer that is assumed before any has ended, in tokens.
_UNKNOWN_ANSWER_TOKENS = 256


class Running(Holder, Protocol):
    """Who holds a slot: tokens to compute before its next one, blocks that come free with it (in windows as
    well), and the length of its answer so far and at most.
    """

    @property
    def remaining_prefill(self) -> int: ...
    @property
    def num_held_blocks(self) -> int: ...
    @property
    def num_held_window_blocks(self) -> int: ...
    @property
    def num_output_tokens(self) -> int: ...
    @property
    def max_output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """What runs while somebody asks."""

    num_slots: int
    running: Sequence[Running]
    block_size: int
    # Blocks that nobody holds, and that are promised to nobody.
    num_free_blocks: float = math.inf
    # Where only some layers have a window: the same of their blocks, and how many of these a sequence needs.
    num_free_window_blocks: float = 0
    most_window_blocks: int = 0
    # Bytes of a block and of a window block, where memory goes from one kind to the other.
    block_bytes: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request has before it, in seconds."""

    # Until something of it is computed, if higher tiers come as they may; inf is not as long as they do.
    wait_s: float
    # The same if they come as they did on average, and for no longer than they have come.
    usual_wait_s: float
    # The same at the rate at which its tier gets slots, where that is shorter; refusals show it.
    shown_wait_s: float
    # Then, until its prompt is computed.
    prompt_s: float
    # How long requests take that were sent away, return later and go before it.
    line_s: float
    # Others go before it: they are expected back, or its tenant was accepted more than theirs.
    makes_way: bool
    # Hash of its prompt, by which it is known when it comes back.
    prompt: int
    # Tokens of each slot that it takes, by weight, as far as they can be foreseen.
    weighted_tokens: float


@dataclass(frozen=True)
class WaitForecast:
    """Predicts waits from what an engine has measured, and from who waits, runs and was sent away."""

    line: Line
    shares: Shares
    rate: StepRate
    traffic: Traffic
    tickets: Tickets = field(default_factory=Tickets)

    def of(self, request: Request, num_tokens: int, batch: Batch, now: float) -> Forecast:
        """What a new request with so many tokens to compute would have before it."""
        tickets, account, priority = self.tickets, account_of(request), request.priority
        prompt = hash(request.prompt_token_ids)
        is_back = tickets.is_back(account, prompt, now)
        ahead, wait_s, usual_wait_s, in_line = self.line.ahead(request, num_tokens, {}), 0.0, 0.0, 1
        if not self._is_free(request, ahead, num_tokens, batch):
            coming = {} if is_back else tickets.open_slots(priority, now)
            in_line = self.line.ahead(request, num_tokens, coming).num_slots + slots_of(request)
            wait_s, usual_wait_s = self._wait_for_slots_s(priority, in_line, batch, now)
            if is_back:
                # Requests that may still come do not lengthen a wait that was promised.
                wait_s = usual_wait_s
        running = sum(each.remaining_prefill for each in batch.running if each.account[0] >= priority)
        prompts_s = self.rate.seconds_for(ahead.num_tokens + running)
        # The tier's own rate is known better than the difference of what comes free and what others take.
        shown_wait_s = min(usual_wait_s, tickets.wait_s(priority, in_line, now, usual_wait_s))
        interval_s = self._interval_s(request, usual_wait_s / in_line)
        weighted_tokens = self._weighted_tokens(request)
        line_s = tickets.line_s(account, prompt, weighted_tokens, now, interval_s)
        return Forecast(
            wait_s=max(wait_s, prompts_s),
            usual_wait_s=max(usual_wait_s, prompts_s),
            shown_wait_s=max(shown_wait_s, prompts_s),
            prompt_s=self.rate.seconds_for(num_tokens),
            line_s=line_s,
            makes_way=tickets.leads(account, weighted_tokens) or (line_s > 0 and not is_back),
            prompt=prompt,
            weighted_tokens=weighted_tokens,
        )

    def _weighted_tokens(self, request: Request) -> float:
        answer = min(request.sampling.max_tokens, self.rate.answer_tokens or math.inf)
        return (len(request.prompt_token_ids) / slots_of(request) + answer) / request.weight

    def _interval_s(self, request: Request, slot_s: float) -> float:
        """Time between two requests of the tenant, if each slot takes so long, shared with who is there."""
        parts = self.line.parts_of(request.priority)
        others = sum(part.weight for tenant, part in parts.items() if tenant != request.tenant)
        return slot_s * (1 + others / request.weight)

    def _is_free(self, request: Request, ahead: Part, num_tokens: int, batch: Batch) -> bool:
        """Whether everybody ahead and the request fit into the batch, others making room."""
        num_slots, priority = ahead.num_slots + slots_of(request), request.priority
        lower = [each for each in batch.running if each.account[0] < priority and not each.boosted]
        free = batch.num_slots - len(batch.running) + len(lower)
        if num_slots > free + sum(
            num_spare for _, num_spare in self.shares.donors(account_of(request), request.weight)
        ):
            return False
        # Every sequence may leave a block half empty, and needs one more to grow.
        needed = -(-(ahead.num_tokens + num_tokens) // batch.block_size) + 2 * num_slots
        free_blocks = batch.num_free_blocks + sum(each.num_held_blocks for each in lower)
        in_windows = min(needed, num_slots * batch.most_window_blocks)
        free_windows = batch.num_free_window_blocks + sum(each.num_held_window_blocks for each in lower)
        if batch.block_bytes is None:
            return needed <= free_blocks and in_windows <= free_windows
        size, window_size = batch.block_bytes
        return needed * size + in_windows * window_size <= free_blocks * size + free_windows * window_size

    def _wait_for_slots_s(self, priority: int, in_line: int, batch: Batch, now: float) -> tuple[float, float]:
        """Until so many slots came free, if higher tiers come as they may, and as they usually do."""
        rates, freed, step_s = self.traffic.above(priority), self.traffic.freed, self.rate.step_s
        # More of them may come than lately did; a slot promised twice is worse than one left over.
        higher = sum(rate.per_s(now, deviations=1.0) for rate in rates)
        usual_higher = sum(rate.per_s(now) for rate in rates)
        turnover = freed.per_s(now)
        if not freed.is_known or not freed.is_fresh:
            if not step_s:
                # Nothing was measured: as many may wait as there are slots.
                few = in_line <= 2 * batch.num_slots - len(batch.running)
                return (0.0, 0.0) if few else (math.inf, math.inf)
            if not higher:
                return (self._by_length(in_line, batch) * step_s,) * 2
            turnover = batch.num_slots / (self._usual_tokens(batch) * step_s)
        wait_s = in_line / (turnover - higher) if turnover > higher else math.inf
        usual_s = in_line / (turnover - usual_higher) if turnover > usual_higher else math.inf
        # A stream is expected to last as long again as it has lasted, so a burst is not taken for an endless
        # one.
        burst = sum(rate.per_s(now) * rate.lasted_s() for rate in rates)
        return wait_s, min(usual_s, (in_line + burst) / turnover)

    def _usual_tokens(self, batch: Batch) -> float:
        """Length of an answer, as those that ended had it."""
        longest = max((each.max_output_tokens for each in batch.running), default=1)
        return self.rate.answer_tokens or min(_UNKNOWN_ANSWER_TOKENS, longest)

    def _by_length(self, in_line: int, batch: Batch) -> float:
        """Steps until so many slots are free, if running answers become as long as others did."""
        usual = self._usual_tokens(batch)
        left = [0.0] * (batch.num_slots - len(batch.running)) + sorted(
            min(
                each.max_output_tokens - each.num_output_tokens,
                max(usual - each.num_output_tokens, usual / 8),
            )
            for each in batch.running
        )
        rounds, slot = divmod(in_line - 1, len(left))
        return rounds * usual + left[slot]
