"""When a call that nobody answered is made again: before its first message, and never after it."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from millrace_client.errors import MillraceApiError, UnavailableError


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Calls refused as UNAVAILABLE are made `attempts` times at most, with growing pauses between them.

    A pause is drawn from 0 to `first_pause_s`, doubled each time up to `longest_pause_s`; where the server
    says when to come back, it is at least that. Raises ValueError that names the field.
    """

    attempts: int = 4
    first_pause_s: float = 0.2
    longest_pause_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.attempts <= 100:
            raise ValueError(f"attempts: {self.attempts} is not from 1 to 100; 1 never tries again")
        if not 0 <= self.first_pause_s <= self.longest_pause_s <= 600:
            raise ValueError(
                f"first_pause_s, longest_pause_s: {self.first_pause_s:g} and {self.longest_pause_s:g} are "
                "not in order from 0 to 600 seconds"
            )

    def pause_s(self, error: MillraceApiError, num_tried: int, left_s: float | None) -> float | None:
        """Seconds until the next attempt, after `num_tried`; None where there is none.

        An attempt that could begin only after the `left_s` seconds of the call is none.
        """
        if not isinstance(error, UnavailableError) or num_tried >= self.attempts:
            return None
        longest = min(self.longest_pause_s, self.first_pause_s * 2 ** (num_tried - 1))
        pause = max(random.uniform(0, longest), error.retry_after_s or 0.0)
        return None if left_s is not None and pause >= left_s else pause


class CallDeadline:
    """What is left of a call's time, all attempts together; without a limit it never ends."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def left_s(self) -> float | None:
        """Seconds, 0 at least; None without a limit."""
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())
