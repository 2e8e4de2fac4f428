"""What one look at a sequence saves where it only goes on: the scheduler plans and books decode steps.

The baseline, same run: every row goes the general way (`RowWriter.add`, the whole of `ResultHandler.apply`).

    python -m benchmarks.engine.next_tokens [--json OUT]
"""

from __future__ import annotations

import random
import statistics
import time
from unittest import mock

from benchmarks.engine.report import Row, arguments, publish
from benchmarks.engine.virtual import Arrival, Device, new_request, plan_result
from engine.config import CacheConfig, SchedulerConfig
from engine.scheduler import Scheduler
from engine.scheduler.plan_draft import RowWriter
from engine.scheduler.results import ResultHandler

_PROMPT_TOKENS, _STEPS = 64, 400


def _medians_us(num_sequences: int) -> tuple[float, float]:
    """Of `schedule` and `update`."""
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=16_384)
    scheduler = Scheduler(config, CacheConfig(), Device().memory(), model="virtual")
    for index in range(num_sequences):
        arrival = Arrival(0.0, _PROMPT_TOKENS, 2 * _STEPS, "decode")
        scheduler.submit(new_request(index, arrival, random.Random(index)), 0.0)
    planning, booking = [], []
    for step in range(_STEPS):
        began = time.perf_counter()
        plan = scheduler.schedule(0.01 * step)
        planned = time.perf_counter()
        result = plan_result(plan)
        answered = time.perf_counter()
        scheduler.update(result, 0.01 * step)
        booking.append(time.perf_counter() - answered)
        planning.append(planned - began)
        scheduler.take_events()
    return statistics.median(planning) * 1e6, statistics.median(booking) * 1e6


def _declines(*_: object) -> bool:
    return False


def main() -> None:
    """Both ways, for batches of three sizes."""
    options = arguments(__doc__ or "")
    rows: list[Row] = []
    for num_sequences in (1, 32, 128):
        with (
            mock.patch.object(RowWriter, "add_next", _declines),
            mock.patch.object(ResultHandler, "_take_next", _declines),
        ):
            general = _medians_us(num_sequences)
        for way, (plan_us, book_us) in (("baseline: general", general), ("ours", _medians_us(num_sequences))):
            rows.append({"sequences": num_sequences, "way": way, "plan us": plan_us, "book us": book_us})
    publish("Decode steps of the scheduler alone (medians)", rows, options.json)


if __name__ == "__main__":
    main()
