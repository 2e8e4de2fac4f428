"""Monotonic seconds, in which the services measure, to Unix nanoseconds, in which spans are written."""

from __future__ import annotations

import time


def unix_ns(monotonic_s: float) -> int:
    """The moment `monotonic_s` of CLOCK_MONOTONIC (time.monotonic()) in nanoseconds since the Unix epoch.

    CLOCK_MONOTONIC is the same in every process of a machine, so moments may come from another process. The
    clocks' distance is asked each time: it changes when the wall clock is corrected.
    """
    return time.time_ns() - time.monotonic_ns() + round(monotonic_s * 1e9)
