"""How long a step takes, by what is in it: learned from steps, and asked before the next one is planned.

A step is a part for the answers in it and a part for its chunks of prompts. Both are straight lines over
their work: what a part costs whatever its size, and what each unit of work adds. The first term is what makes
small chunks dear, and prompts better computed in few large ones.
"""

from __future__ import annotations

import math

from engine.types import MeasuredSpeed

# Weight of the newest step.
_ALPHA = 0.05
# A line's slope is known from sizes that differ by so much of their mean (as a standard deviation).
_SPREAD = 0.1
# A step that takes more than so many times what was expected counts as that: something else held it up.
_SURPRISE = 3.0
# And only where so many were seen of both of its parts.
_FEW = 5


class Trend:
    """Seconds over work as a straight line; old steps fade. Neither term is negative."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._weight = self._work = self._seconds = self._squares = self._products = 0.0
        # By how much a line is less steep than the one from zero: 1 is that one, 0 is flat.
        self._steepness = 1.0

    @property
    def is_known(self) -> bool:
        """Whether anything was seen."""
        return self.num_seen > 0

    def add(self, work: float, seconds: float) -> None:
        """One step with so much work took so long."""
        seconds = max(0.0, seconds)
        self.num_seen += 1
        keep = 1.0 - _ALPHA
        self._weight = self._weight * keep + 1.0
        self._work = self._work * keep + work
        self._seconds = self._seconds * keep + seconds
        self._squares = self._squares * keep + work * work
        self._products = self._products * keep + work * seconds
        mean_work, mean_s = self._means()
        variance = self._squares / self._weight - mean_work * mean_work
        if variance > (_SPREAD * mean_work) ** 2 and mean_s:
            slope = (self._products / self._weight - mean_work * mean_s) / variance
            self._steepness = min(1.0, max(0.0, slope * mean_work / mean_s))

    def at(self, work: float) -> float:
        """Seconds for so much work."""
        return self.fixed_s + self.s_per_work * work

    @property
    def fixed_s(self) -> float:
        """Seconds that any step of the kind takes."""
        return (1.0 - self._steepness) * self._means()[1]

    @property
    def s_per_work(self) -> float:
        """Seconds that each unit of work adds."""
        mean_work, mean_s = self._means()
        return self._steepness * mean_s / mean_work if mean_work else 0.0

    def _means(self) -> tuple[float, float]:
        weight = self._weight or 1.0
        return self._work / weight, self._seconds / weight


class StepTime:
    """Seconds of a step with so much work of answers and of prompts. Work is that of `StepRate`.

    What was never seen costs what is known of the other part; nothing, as long as nothing is known.
    """

    def __init__(self) -> None:
        self._decode, self._chunk = Trend(), Trend()
        # Whether chunks were seen beside answers: those alone, which bear all of a step, count until then.
        self._has_mixed = False
        # The last step that had answers alone.
        self.last_decode_s = 0.0

    @classmethod
    def of(cls, speed: MeasuredSpeed) -> StepTime:
        """As measured before the first request."""
        time = cls()
        for num_rows, rate in (
            (1, speed.tokens_per_s_alone),
            (speed.num_together, speed.tokens_per_s_together),
        ):
            if rate and num_rows:
                time._decode.add(num_rows, num_rows / rate)
        for num_tokens, rate in (
            (speed.short_prompt_tokens, speed.short_prompt_tokens_per_s),
            (speed.prompt_tokens or 1, speed.prompt_tokens_per_s),
        ):
            if rate and num_tokens:
                time._chunk.add(num_tokens, num_tokens / rate)
        return time

    def observe(self, decodes: float, chunk: float, seconds: float) -> None:
        """A step with so much work of answers and of prompts took so long."""
        expected_s = self.decode_s(decodes) + self.chunk_s(chunk)
        parts = (self._decode, decodes), (self._chunk, chunk)
        if expected_s and all(trend.num_seen >= _FEW for trend, work in parts if work):
            seconds = min(seconds, _SURPRISE * expected_s)
        if not chunk:
            self.last_decode_s = seconds
            self._decode.add(decodes, seconds)
        elif decodes:
            self._chunk.add(chunk, seconds - self.decode_s(decodes))
            self._has_mixed = True
        elif not self._has_mixed:
            self._chunk.add(chunk, seconds)

    def decode_s(self, work: float) -> float:
        """Seconds of a step with answers alone."""
        if not work:
            return 0.0
        return self._decode.at(work) if self._decode.is_known else self._chunk.s_per_work * work

    def chunk_s(self, work: float) -> float:
        """Seconds that so much of prompts adds to a step."""
        return self._chunk.at(work) if work else 0.0

    def chunk_within(self, seconds: float) -> float:
        """Work of prompts that adds no more than that to a step; inf where it costs nothing."""
        if not self._chunk.is_known:
            return math.inf
        left_s = seconds - self._chunk.fixed_s
        if left_s < 0.0:
            return 0.0
        return left_s / self._chunk.s_per_work if self._chunk.s_per_work else math.inf

    def chunk_at(self, share: float) -> float:
        """Least work of a chunk that is computed at such a share of the best rate; inf where more is always
        faster.
        """
        fixed_s, s_per_work = self._chunk.fixed_s, self._chunk.s_per_work
        if not fixed_s:
            return 0.0
        return share / (1.0 - share) * fixed_s / s_per_work if s_per_work else math.inf
