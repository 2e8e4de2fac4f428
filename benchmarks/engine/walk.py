"""10,000 random submissions, cancellations, waits and steps, some failing: what happened, and the books.

Every invariant is checked after every operation, against a runner that keeps a model of the cache's contents
(see tests/unit/engine/checked_runner.py). Plain and overlapped loop, and with blocks behind a window of 10
tokens given up; the plain one is the baseline.

    python -m benchmarks.engine.walk [--json OUT]
"""

from __future__ import annotations

from collections import Counter

from benchmarks.engine.report import Row, arguments, publish
from engine.types import FinishReason
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.scheduler.test_walk import OPERATIONS, Walk

_NUM_OPERATIONS = 10_000
# Requests from which on the walk steps instead of submitting.
_MOST_OPEN = 40


def walk(loop: str, *, overlap: bool, window: int | None = None) -> Row:
    """One walk to its end; raises AssertionError where anything does not add up."""
    one = Walk(7, faults=True, memory=memory_plan(60), overlap=overlap, num_host_blocks=20, window=window)
    driver, done = one.driver, Counter[str]()
    for _ in range(_NUM_OPERATIONS):
        busy = driver.scheduler.num_requests > _MOST_OPEN
        operation = "step" if busy else one.random.choice(OPERATIONS)
        done["submit" if operation.startswith("submit") else operation] += 1
        one.operate(operation)
    one.finish()
    counters = driver.scheduler.load(driver.now).counters
    ends = Counter(
        event.finish_reason.name.lower()
        for events in driver.events.values()
        for event in events
        if event.finish_reason is not None
    )
    return {
        "loop": loop,
        "operations": sum(done.values()),
        "requests": len(driver.requests),
        "cancelled": ends[FinishReason.CANCELLED.name.lower()],
        "failed steps": counters.failed_steps,
        "preemptions": sum(counters.preemptions.values()),
        "blocks out to host": counters.offloaded_blocks,
        "back": counters.restored_blocks,
        "choices finished": ends["length"],
        "blocks not back": driver.memory.num_blocks - driver.scheduler.num_unreferenced_blocks,
        "runner states left": driver.runner.num_states(),
    }


def main() -> None:
    """Runs the walks."""
    options = arguments(__doc__ or "")
    rows = [
        walk("baseline: plain", overlap=False),
        walk("overlapped", overlap=True),
        walk("overlapped, window 10", overlap=True, window=10),
    ]
    publish("Random operations with injected failures", rows, options.json)


if __name__ == "__main__":
    main()
