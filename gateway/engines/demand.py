"""How many engines this gateway's requests need, by model and pool: for whoever scales engines.

The rule looks ahead by as long as an engine takes to start, and says a number that may be added up over
gateways: parts of engines, of which a deployment needs the sum, rounded up. It knows arrivals, what engines
report, and what is open here; no clock (time is an argument). `millrace simulate --autoscale` runs it.

    work that arrives, in engines:  max(prompt tokens/s / P, answers/s * tokens of one * step(n) / n)
    n, the answers of one step:     as many as keep the strictest target for the time per token
    need = max(work ahead, answers that are open / n) / utilization + prompts not begun / (P * time to start)

Of the two parts of work the greater counts and not their sum, because the steps that engines report compute
prompts beside answers: step(n) has both in it. The highest need of the last `hold_s` counts, so that engines
do not go and come with every wave.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from contract.engines import EngineInfo, EngineLoad
from gateway.config import AutoscalingConfig

# Arrivals are counted over so many seconds.
_BIN_S = 10.0
# Weight of the newest count in level and trend (Holt's linear method).
_LEVEL, _TREND = 0.2, 0.05
# A trend makes the forecast at most so many times the present.
_STEEPEST = 2.0
# Weight of the newest report among those of as many answers, where it is faster than they were, and slower:
# what holds an engine up for once is no reason to have another.
_FASTER, _SLOWER = 0.3, 0.01
# What a best rate keeps from one count to the next, so that a slower engine is believed in the end.
_FADE = 0.995
# Weight of the newest answer's length.
_ANSWER = 0.02
# Standard deviations of a (Poisson) count that are taken for chance.
_CHANCE = 3.0
# Somebody asks, and nothing was measured: more than none, whichever number of gateways say so.
_ANY = 0.01


class Reporter(Protocol):
    """An engine, as an attachment knows it."""

    load: EngineLoad
    info: EngineInfo | None
    # Prompt tokens of requests sent from here without a token yet.
    unstarted_tokens: int

    @property
    def num_open(self) -> int:
        """Requests sent from here that have not ended."""
        ...


class CountForecast(msgspec.Struct):
    """A count for each interval, smoothed: what it will be (Holt, 1957)."""

    level: float = 0.0
    trend: float = 0.0
    is_known: bool = False

    def add(self, count: float) -> None:
        """The count of one more interval."""
        if not self.is_known:
            self.level, self.is_known = count, True
            return
        before = self.level
        self.level = _LEVEL * count + (1 - _LEVEL) * max(0.0, before + self.trend)
        self.trend = _TREND * (self.level - before) + (1 - _TREND) * self.trend

    def ahead(self, num_intervals: float) -> float:
        """The count so many intervals from now; no less than now, since engines go later than they come."""
        return min(self.level + max(0.0, self.trend) * num_intervals, _STEEPEST * self.level)


class StepLine:
    """Seconds of a step by how many answers are in it, from reports."""

    def __init__(self) -> None:
        # By powers of two: (answers, seconds), averages.
        self._seen: dict[int, tuple[float, float]] = {}

    def add(self, num_answers: int, seconds: float) -> None:
        """A report of an engine with so many answers under way."""
        key = num_answers.bit_length()
        old = self._seen.get(key)
        if old is None:
            self._seen[key] = float(num_answers), seconds
        else:
            answers, mean_s = old
            weight = _FASTER if seconds < mean_s else _SLOWER
            self._seen[key] = (
                answers + weight * (num_answers - answers),
                mean_s + weight * (seconds - mean_s),
            )

    def line(self) -> tuple[float, float]:
        """(seconds of a step, seconds that each answer adds); zeros where nothing was seen."""
        points = list(self._seen.values())
        if not points:
            return 0.0, 0.0
        mean_n = sum(answers for answers, _ in points) / len(points)
        mean_s = sum(seconds for _, seconds in points) / len(points)
        spread = sum((answers - mean_n) ** 2 for answers, _ in points)
        if not spread:
            return mean_s, 0.0
        slope = sum((answers - mean_n) * (seconds - mean_s) for answers, seconds in points) / spread
        slope = min(max(slope, 0.0), mean_s / mean_n)
        return mean_s - slope * mean_n, slope

    def answers_s(self, target_s: float | None, most: int) -> tuple[int, float]:
        """(answers of one step that keep the target, seconds of each for a token); (0, 0) where unknown."""
        fixed_s, each_s = self.line()
        if not fixed_s and not each_s:
            return 0, 0.0
        num_answers = most
        if target_s is not None and each_s:
            num_answers = min(most, int((target_s - fixed_s) / each_s))
        num_answers = max(1, num_answers)
        return num_answers, (fixed_s + each_s * num_answers) / num_answers


class PoolDemand:
    """The demand for one model in one pool."""

    def __init__(self, config: AutoscalingConfig) -> None:
        self._config = config
        self._bin_end_s: float | None = None
        self._prompt_tokens = self._num_requests = 0.0
        self._prompts, self._requests = CountForecast(), CountForecast()
        self._answer_tokens = 0.0
        self._prefill_tokens_per_s = 0.0
        # Since the last count; what nobody has reported since is no slower for that.
        self._has_report = False
        self._steps = StepLine()
        self._most_answers = 1
        self._last_asked_s: float | None = None
        # (moment, target): the strictest targets first, as far as they are recent.
        self._targets: dict[float, float] = {}
        # (moment, need), falling: those that may still be the highest of the last `hold_s`.
        self._needs: deque[tuple[float, float]] = deque()

    def asked(self, prompt_tokens: int, tpot_target_s: float | None, now: float) -> None:
        """A request has come, whether or not there is an engine for it."""
        self._advance(now)
        self._prompt_tokens += prompt_tokens
        self._num_requests += 1
        self._last_asked_s = now
        if tpot_target_s is not None:
            self._targets[tpot_target_s] = now

    def routed(self, load: EngineLoad, info: EngineInfo, cached_tokens: int) -> None:
        """A request goes to this engine, which has so much of its prompt already, and says how fast it is."""
        self._prompt_tokens = max(0.0, self._prompt_tokens - cached_tokens)
        self._most_answers = max(1, info.max_num_seqs)
        self._has_report = True
        self._prefill_tokens_per_s = max(self._prefill_tokens_per_s, load.prefill_tokens_per_s)
        if load.num_running and load.decode_tokens_per_s:
            self._steps.add(load.num_running, load.num_running / load.decode_tokens_per_s)

    def ended(self, answer_tokens: int) -> None:
        """An answer has ended."""
        old = self._answer_tokens
        self._answer_tokens = answer_tokens if not old else old + _ANSWER * (answer_tokens - old)

    def engines(self, reporters: Iterable[Reporter], now: float) -> float:
        """Engines that are needed by when one that is started now is ready; 0 where nobody has asked for
        `idle_s` and nothing is open. `reporters` are those that serve it.
        """
        self._advance(now)
        config, attached = self._config, list(reporters)
        num_open = sum(each.num_open for each in attached)
        if not num_open and (self._last_asked_s is None or now - self._last_asked_s >= config.idle_s):
            self._needs.clear()
            return 0.0
        need = max(_ANY, self._need(num_open, sum(each.unstarted_tokens for each in attached), now))
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((now, need))
        while self._needs[0][0] < now - config.hold_s:
            self._needs.popleft()
        return self._needs[0][1]

    def _need(self, num_open: int, unstarted_tokens: int, now: float) -> float:
        config, rate = self._config, self._prefill_tokens_per_s
        self._targets = {each: at for each, at in self._targets.items() if now - at < config.hold_s}
        strictest = min(self._targets, default=None)
        num_answers, token_s = self._steps.answers_s(strictest, self._most_answers)
        ahead = config.load_s / _BIN_S
        expected = self._requests.ahead(ahead)
        # What has come in this interval already counts at once where chance does not explain it.
        surge = max(1.0, (self._num_requests - _CHANCE * math.sqrt(self._num_requests)) / max(expected, 1.0))
        prompts = self._prompts.ahead(ahead) / (rate * _BIN_S) if rate else 0.0
        # Before an answer has ended, those that are open say how long they are.
        work = surge * max(prompts, expected / _BIN_S * self._answer_tokens * token_s)
        if num_answers:
            work = max(work, num_open / num_answers)
        waiting = unstarted_tokens / (rate * config.load_s) if rate else 0.0
        return work / config.utilization + waiting

    def _advance(self, now: float) -> None:
        if self._bin_end_s is None:
            self._bin_end_s = now + _BIN_S
        if now - self._bin_end_s > 1000 * _BIN_S:
            # Nobody has asked for so long that nothing of it is left.
            self._prompts, self._requests = CountForecast(), CountForecast()
            self._prompt_tokens = self._num_requests = 0.0
            self._bin_end_s = now + _BIN_S
        while now >= self._bin_end_s:
            self._prompts.add(self._prompt_tokens)
            self._requests.add(self._num_requests)
            self._prompt_tokens = self._num_requests = 0.0
            if self._has_report:
                self._prefill_tokens_per_s *= _FADE
                self._has_report = False
            self._bin_end_s += _BIN_S


class EngineDemand:
    """By model and pool. `reporters` finds the engines that serve both."""

    def __init__(
        self, config: AutoscalingConfig, reporters: Callable[[str, str], Iterable[Reporter]]
    ) -> None:
        self._config = config
        self._reporters = reporters
        self._models: dict[tuple[str, str], PoolDemand] = {}

    @property
    def asked(self) -> list[tuple[str, str]]:
        """Pairs that were asked for."""
        return list(self._models)

    def of(self, model: str, pool: str) -> PoolDemand:
        """What is known of one pair."""
        found = self._models.get((model, pool))
        if found is None:
            found = self._models[model, pool] = PoolDemand(self._config)
        return found

    def engines(self, model: str, pool: str, now: float) -> float:
        """See PoolDemand."""
        return self.of(model, pool).engines(self._reporters(model, pool), now)
