"""Measured speed of the engine, and how often slots are asked for and come free."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Mapping

from engine.policy.shares import Account
from engine.policy.step_time import StepTime
from engine.types import MeasuredSpeed

# Steps whose median is told.
_LATEST_STEPS = 63
# Weight of the newest step in the averages.
_ALPHA = 0.1
# Tokens from which on a chunk is computed about as fast per token as a larger one, on any device that is slow
# enough for a step to be cut by time: the rows that decode beside it are computed in any case.
LEAST_CHUNK_TOKENS = 24
# A chunk has at least so many tokens for each sequence that decodes beside it: what they compute makes
# prompts wait, and a burst that is cut too fine would take much longer as a whole.
LEAST_CHUNK_PER_DECODE = 4
# A prior counts as much as so many seconds of measuring.
_PRIOR_S = 5.0
# Shortest time, in seconds, that a rate of events is taken over.
_SHORTEST_S = 1.0
# Seconds over which slots that come free, and requests for them, are averaged.
_SLOTS_MEMORY_S = 10.0
# Tenants that asked within so many seconds count as active, because they may ask again at any moment.
_LATELY_S = 1.0


class StepRate:
    """Exponential averages over steps, in tokens per second; 0 while nothing was measured.

    Work is what a step computes, in tokens that look back on nothing: one that looks back on `balance`
    positions is twice the work.
    """

    def __init__(self, balance: float = math.inf) -> None:
        self.balance = balance
        self.prefill_tokens_per_s = 0.0
        self.decode_tokens_per_s = 0.0
        # Prefill rate of steps that used up their budget: other steps show the load, not what the engine can
        # do.
        self.full_prefill_tokens_per_s = 0.0
        # Seconds of full steps that left prompts waiting, since the last full step that computed some.
        self._without_prompts_s = 0.0
        # What a step takes by what is in it.
        self.time = StepTime()
        # From one result to the next while there is work: an answer's time for a token.
        self.step_s = 0.0
        self._latest_s: deque[float] = deque(maxlen=_LATEST_STEPS)
        # Length of answers that ended, in tokens.
        self.answer_tokens = 0.0

    @classmethod
    def of(cls, speed: MeasuredSpeed, balance: float = math.inf) -> StepRate:
        """As measured before the first request."""
        rate = cls(balance)
        rate.prefill_tokens_per_s = rate.full_prefill_tokens_per_s = speed.prompt_tokens_per_s
        rate.decode_tokens_per_s = speed.tokens_per_s_alone
        rate.step_s = 1 / speed.tokens_per_s_alone if speed.tokens_per_s_alone else 0.0
        rate.time = StepTime.of(speed)
        return rate

    def work(self, start: int, num_tokens: int) -> float:
        """Work of so many tokens from position `start` on."""
        return num_tokens * (1.0 + (start + num_tokens / 2) / self.balance)

    def tokens_for(self, work: float, start: int) -> int:
        """Most tokens from position `start` on that are no more work than that; one at least if that is 1."""
        each, grows = 1.0 + start / self.balance, 2.0 / self.balance
        # The positive root of n * each + n * n * grows / 4, in a form that no device rounds away.
        if work < 1.0:
            return 0
        return max(1, int(2.0 * work / (each + math.sqrt(each * each + grows * work))))

    def stepped(self, seconds: float) -> None:
        """Books the whole duration of a step, planning included."""
        self.step_s = _average(self.step_s, seconds)
        self._latest_s.append(seconds)

    @property
    def step_p50_s(self) -> float:
        """What the latest steps took, by their median; 0 before the first."""
        return sorted(self._latest_s)[len(self._latest_s) // 2] if self._latest_s else 0.0

    def ended(self, num_tokens: int) -> None:
        """Books the length of an answer."""
        self.answer_tokens = _average(self.answer_tokens, num_tokens)

    def observe(
        self, prefill: int, decode: int, seconds: float, *, chunk: float, decodes: float, full: bool = False
    ) -> None:
        """Books one step that computed so many prefill and decode tokens, of so much work, in `seconds`. A
        full one had room for no more of prompts.
        """
        if seconds <= 0:
            return
        self.time.observe(decodes, chunk, seconds)
        if full and not prefill:
            self._without_prompts_s += seconds
        if prefill:
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefill / seconds)
            if full:
                rate = prefill / (seconds + self._without_prompts_s)
                self.full_prefill_tokens_per_s = _average(self.full_prefill_tokens_per_s, rate)
            self._without_prompts_s = 0.0
        if decode:
            self.decode_tokens_per_s = _average(self.decode_tokens_per_s, decode / seconds)

    def seconds_for(self, num_tokens: int) -> float:
        """Time in which so many tokens of prompt are computed while others wait; 0 before it was measured."""
        rate = self.full_prefill_tokens_per_s
        return num_tokens / rate if rate else 0.0


def least_chunk(num_decodes: int) -> int:
    """Tokens of prompts that a step has at least beside so many rows that decode."""
    return max(LEAST_CHUNK_TOKENS, LEAST_CHUNK_PER_DECODE * num_decodes)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _ALPHA * (new - old)


class EventRate:
    """Events per second over the last few seconds in which the clock ran; older ones fade."""

    def __init__(self, memory_s: float, *, running: bool = True) -> None:
        self._memory_s = memory_s
        self._count = 0.0
        self._elapsed_s = 0.0
        self._last_s: float | None = None
        # When the first of the events came that have not faded, and the last one.
        self._since_s = self._newest_s = 0.0
        self._running = running

    def count(self, now: float, events: int = 1) -> None:
        """Books events; those while the clock stands still are ignored."""
        self._advance(now)
        if self._running:
            if not self.is_fresh:
                self._since_s = now
            self._newest_s = now
            self._count += events

    def run(self, now: float, *, running: bool) -> None:
        """Starts or stops the clock."""
        self._advance(now)
        self._running = running

    @property
    def is_known(self) -> bool:
        """Whether events were counted, and for long enough to speak of a rate."""
        return self._count > 0 and self._elapsed_s >= _SHORTEST_S

    @property
    def is_fresh(self) -> bool:
        """Whether at least one event has not faded yet."""
        return self._count >= 1.0

    def per_s(self, now: float, *, deviations: float = 0.0, prior_per_s: float | None = None) -> float:
        """The rate, so many standard deviations of its (Poisson) estimate above it; `prior_per_s` is what is
        believed before anything is measured.
        """
        self._advance(now)
        if prior_per_s is not None:
            return (self._count + _PRIOR_S * prior_per_s) / (self._elapsed_s + _PRIOR_S)
        count = self._count + deviations * math.sqrt(self._count)
        return count / max(self._elapsed_s, _SHORTEST_S)

    def lasted_s(self) -> float:
        """For how long events have been coming."""
        return self._newest_s - self._since_s

    def _advance(self, now: float) -> None:
        if self._last_s is not None and self._running:
            kept = math.exp(-(now - self._last_s) / self._memory_s)
            self._count *= kept
            self._elapsed_s = self._elapsed_s * kept + self._memory_s * (1 - kept)
        self._last_s = now


class Traffic:
    """Slots that are asked for, and that come free."""

    def __init__(self) -> None:
        # Slots that come free per second, measured while somebody waits for one.
        self.freed = EventRate(_SLOTS_MEMORY_S, running=False)
        # Slots asked for per second, by priority.
        self._asked: dict[int, EventRate] = {}
        # The account that asked last, and when; and when the last of all others did.
        self._newest: tuple[Account | None, float] = (None, -math.inf)
        self._others_s = -math.inf

    def arrived(self, account: Account, num_slots: int, now: float) -> None:
        """A request joins the queue."""
        self._asked.setdefault(account[0], EventRate(_SLOTS_MEMORY_S)).count(now, num_slots)
        if self._newest[0] != account:
            self._others_s = self._newest[1]
        self._newest = (account, now)

    def had_several(self, now: float) -> bool:
        """Whether several tenants have asked lately: whoever comes next waits for the step under way."""
        return now - self._others_s < _LATELY_S

    def above(self, priority: int) -> list[EventRate]:
        """How often higher tiers ask for slots."""
        return [rate for each, rate in self._asked.items() if each > priority]


# Prompts may add as much work to a step as its time allows, shared among tenants, because answers wait for
# it. Tokens do not say how long a step takes: one at the end of a long context is several times the work of
# one at the beginning (see `StepRate`). And a prompt that has started goes on before others, so a tenant's
# prompts may take no more than its part of a step while other tenants' wait or are computed, too; a part that
# nobody takes makes the step shorter.


class PromptWork:
    """Work that is left of one step. Without a limit it never runs out."""

    def __init__(
        self,
        limits: Mapping[int, float] | None = None,
        long_share: float = 1.0,
        sharers: Collection[Account] = (),
    ) -> None:
        # Work of all prompts up to which those of a tier may add theirs.
        self._limits = limits or {}
        # The most that any tier may take.
        self.limit = max(self._limits.values(), default=math.inf)
        self._used = 0.0
        self._long_left = self.limit * long_share
        # Part of each tenant of a tier, and what was taken of it.
        self._parts = {
            priority: max(LEAST_CHUNK_TOKENS, self._limits.get(priority, self.limit) / num_tenants)
            for priority, num_tenants in Counter(priority for priority, _ in sharers).items()
        }
        self._taken: dict[Account, float] = {}

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return any(limit < math.inf for limit in self._limits.values())

    @property
    def is_used_up(self) -> bool:
        """Whether not one token more fits."""
        return self.limit - self._used < 1.0

    def allowance(self, account: Account, *, is_long: bool) -> float:
        """Work that a prompt of the account may add."""
        part = self._parts.get(account[0], math.inf) - self._taken.get(account, 0.0)
        left = self._limits.get(account[0], self.limit) - self._used
        return min(left, part, self._long_left if is_long else math.inf)

    def acquire(self, account: Account, work: float, *, is_long: bool) -> None:
        """A prompt of the account takes so much; negative work is given back."""
        if self.is_limited:
            self._used += work
            self._taken[account] = self._taken.get(account, 0.0) + work
            if is_long:
                self._long_left -= work
