"""What people are told of a batch that is held up, or ends without all that it should have."""

from __future__ import annotations

import time

from gateway.batches.types import LineOutcome, Problem, RequestBatch


def expiry(batch: RequestBatch) -> str:
    """When its window ends, and what then becomes of it; the same words whenever it is asked."""
    ends = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(batch.deadline_unix_s))
    window = f" of {batch.completion_window}" if batch.completion_window else ""
    return f"its completion_window{window} ends at {ends}: what is not answered then expires"


def out_of_reach(batch: RequestBatch, lines_per_s: float, left_s: float) -> str:
    """That its window ends before it is through, at so many lines a second; "" where it does not."""
    num_left = batch.num_lines - batch.num_answered
    needed_s = num_left / lines_per_s
    if needed_s <= left_s:
        return ""
    return (
        f"completion_window {batch.completion_window} is out of reach: at {lines_per_s:.3g} lines a second "
        f"the {num_left} that are left take {_told(needed_s)}, and {_told(left_s)} are left; what is not "
        "answered then expires"
    )


def without_room(outcome: LineOutcome, num_lines: int) -> Problem:
    """Of an end on a full disk: lines that nobody answered, of which its files do not tell."""
    became = outcome.name.lower()
    message = (
        f"{num_lines} lines were {became} without a line in the error file, because the disk of "
        "gateway.batches.directory is full; the results of all lines that were answered are there"
    )
    return Problem("disk_full", message)


def _told(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(0.0, seconds) / 60:.1f} min"
