"""How much of prompts a step may hold: as much as those who are being answered in it can bear.

An answer whose tier has a target for the time per token has a pace. What it is ahead of that is in hand, and
a step may last until its next token is due. Sarathi-Serve (OSDI 2024) has one number for all steps; "dynamic
chunking" by such slack is Niyama's (Goel et al., arXiv 2503.22562). A chunk costs something whatever its
size, so many small ones waste the device: prompts wait, while answers get ahead, until there is time for a
chunk that is worth it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from engine.policy.rates import least_chunk
from engine.policy.step_time import StepTime

# Pace that is kept, as a part of the target: steps are forecast, and forecasts err.
AIM = 0.95
# A step lasts no longer than so many targets of an answer, however much that has in hand. Who is further
# behind has lost what cannot be made up at the cost of others, and goes on at its pace.
LONGEST_GAP = 3.0
# A step of an answer that is behind lasts no longer than so much of its target.
_CATCH_UP = 0.75
# The rate, as a share of the best, at which prompts had rather be computed: they wait for so large a chunk.
_FULL_RATE = 0.9


class _Progress(NamedTuple):
    """Part of the time that prompts have in any case, and the rate, as a share of the best, at which it is
    used.
    """

    share: float
    rate: float


_LEAST = _Progress(0.25, 0.5)
# The same if their first tokens are late, too, or answers cannot have their pace even alone: then neither
# goes before the other.
_EVEN = _Progress(0.5, 0.75)
# And where no target is given, as much as the answers beside them.
_LEAST_STEPS = 2.0


class Pace(NamedTuple):
    """What an answer of a tier with a target is owed next."""

    priority: int
    # Seconds for a token.
    target_s: float
    # When the next token is due.
    due_s: float

    def gap_s(self, starts_s: float) -> float:
        """Longest step, begun then, that leaves the answer at its pace."""
        left_s = self.due_s - starts_s
        if left_s < (1.0 - LONGEST_GAP) * self.target_s:
            left_s = self.target_s
        return min(max(left_s, _CATCH_UP * self.target_s), LONGEST_GAP * self.target_s)


def pace_of(priority: int, target_s: float, start_s: float, num_tokens: int) -> Pace:
    """The pace of an answer that had its first token at `start_s`, and waits for the `num_tokens`th after."""
    return Pace(priority, AIM * target_s, start_s + num_tokens * AIM * target_s)


class Answers(NamedTuple):
    """Those who are answered in a step, and the step's beginning."""

    # Rows, and their work.
    num_rows: int
    work: float
    # Of those whose tier has a target.
    paces: Sequence[Pace]
    starts_s: float


class PromptsLeft(NamedTuple):
    """What there is to compute of prompts of one tier and above."""

    priority: int
    # Work that is left.
    work: float
    # For how long nothing of prompts was computed though something waited.
    waited_s: float
    # Some can no longer have their first token in time.
    is_late: bool = False
    # Tenants other than theirs wait, too, or are answered without a target.
    has_neighbours: bool = False


class StepLimits(NamedTuple):
    """Longest steps in seconds where no target says more, and the same where neighbours wait for them; 0 is
    any.
    """

    longest_s: float
    neighbours_s: float = 0.0


def _most(time: StepTime, answers: Answers, prompts: PromptsLeft, limits: StepLimits) -> float:
    """Work of prompts that no step exceeds, whatever those who have a pace can bear."""
    decode_s, most = time.decode_s(answers.work), math.inf
    bounds = [(limits.longest_s, _LEAST.rate)]
    if prompts.has_neighbours:
        bounds.append((limits.neighbours_s, _EVEN.rate))
    for limit_s, rate in bounds:
        if limit_s:
            left_s = max(limit_s, _LEAST_STEPS * decode_s) - decode_s
            least = max(least_chunk(answers.num_rows), time.chunk_at(rate))
            most = min(most, max(least, time.chunk_within(left_s)))
    return most


def chunk_work(time: StepTime, answers: Answers, prompts: PromptsLeft, limits: StepLimits) -> float:
    """Work of prompts that the step may hold; 0 leaves it to the answers, which get ahead meanwhile.

    Answers of lower tiers than the prompts can be kept waiting for as long as any step may last.
    """
    decode_s, most = time.decode_s(answers.work), _most(time, answers, prompts, limits)
    if not answers.paces:
        return most
    # Nobody has less than the answers' own part of a step.
    longest_s = min(LONGEST_GAP * max(each.target_s, decode_s) for each in answers.paces)
    equals = [each for each in answers.paces if each.priority >= prompts.priority]
    kept = [each.gap_s(answers.starts_s) for each in equals if each.target_s > decode_s]
    is_lost = len(kept) == 0 < len(equals)
    fits = 0.0 if is_lost else min(most, time.chunk_within(min([longest_s, *kept]) - decode_s))
    is_late = prompts.is_late and all(each.priority == prompts.priority for each in equals)
    progress = _EVEN if is_lost or is_late else _LEAST
    least = min(prompts.work, most, max(time.chunk_at(progress.rate), least_chunk(0)))
    wanted = min(prompts.work, most, time.chunk_at(_FULL_RATE), time.chunk_within(longest_s - decode_s))
    if fits >= max(least, wanted):
        return fits
    if prompts.waited_s >= (1.0 / progress.share - 1.0) * time.chunk_s(least):
        return max(fits, least)
    return 0.0
