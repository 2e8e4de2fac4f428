"""Blocks that one sequence holds while it grows to 4,096 tokens, when every layer has a window of 256 tokens.

Counts of the scheduler, which do not depend on the machine: with every block kept (the baseline), and with
those behind the window given up.

    python -m benchmarks.engine.window [--json OUT]
"""

from __future__ import annotations

from benchmarks.engine.report import Row, arguments, publish
from engine.config import CacheConfig, SchedulerConfig, SimulatedConfig
from engine.runner.simulated import SimulatedRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from tests.unit.engine.driver import memory_plan

_NUM_TOKENS, _WINDOW, _BLOCK_SIZE = 4096, 256, 16


def held(name: str, window: int | None, num_prompt: int) -> Row:
    """One sequence of 4,096 tokens, of which `num_prompt` are its prompt, in steps of 512 tokens."""
    memory = memory_plan(_NUM_TOKENS // _BLOCK_SIZE + 1, _BLOCK_SIZE, _NUM_TOKENS)
    config = SchedulerConfig(max_num_batched_tokens=512)
    scheduler = Scheduler(config, CacheConfig(), memory, model="m", window=window)
    runner = SimulatedRunner(SimulatedConfig(step_ms=0.0, tokens_per_s=0.0))
    sampling = SamplingParams(max_tokens=_NUM_TOKENS - num_prompt)
    prompt = tuple(range(num_prompt))
    scheduler.submit(Request(request_id=1, external_id="", prompt_token_ids=prompt, sampling=sampling), 0.0)
    counts, now = [], 0.0
    while scheduler.num_requests:
        plan = scheduler.schedule(now)
        now += 0.001
        scheduler.update(runner.launch(plan).wait(), now)
        if scheduler.num_requests:
            counts.append(memory.num_blocks - scheduler.num_unreferenced_blocks)
    return {
        "configuration": name,
        "prompt tokens": num_prompt,
        "blocks held at 4,096 tokens": counts[-1],
        "most blocks held after a step": max(counts),
    }


def main() -> None:
    """Both sides, for a short prompt and a long one."""
    options = arguments(__doc__ or "")
    rows = [
        held(name, window, num_prompt)
        for num_prompt in (16, 4000)
        for name, window in (("baseline: every block kept", None), ("ours: given up", _WINDOW))
    ]
    publish("Blocks of one sequence, window 256, blocks of 16 tokens", rows, options.json)


if __name__ == "__main__":
    main()
