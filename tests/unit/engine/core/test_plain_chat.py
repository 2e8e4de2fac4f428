"""What an engine can do besides runs for those alone that ask for it: a plain chat passes none of it."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import FrameType

from engine.config import AdaptersConfig, CacheConfig, SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.scheduler.adapters import AdapterSlots
from engine.types import Request, SamplingParams
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import open_runner

BUNDLED = Path("models/millrace-nano")
ENGINE = Path(sys.modules[Scheduler.__module__].__file__ or "").parents[1]
OPTIONAL = (
    "adapters/",
    "kv/disk",
    "kv/pins",
    "kv/sequence_states",
    "kv/state_pool",
    "kv/window_pool",
    "policy/isolation",
    "runner/forgotten/",
    "runner/halving",
    "runner/pooling",
    "runner/prefix_",
    "runner/ranks/",
    "runner/speculation/",
    "sampling/closing",
    "sampling/grammar",
    "sampling/thinking",
    "scheduler/adapters",
    "scheduler/beams",
    "scheduler/disk_prefixes",
    "scheduler/needs",
    "types/retention",
)


def files_of(scheduler: Scheduler, runner: ModelRunner, requests: list[Request]) -> set[str]:
    """Files of the engine whose functions run until the requests are answered."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, value: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ENGINE)):
            found.add(str(Path(frame.f_code.co_filename).relative_to(ENGINE)))

    sys.setprofile(note)
    try:
        for request in requests:
            scheduler.submit(request, 0.0)
        while scheduler.has_work:
            scheduler.update(runner.launch(scheduler.schedule(0.0)).wait(), 0.0)
            scheduler.next_deadline_s()
            scheduler.load(0.0)
    finally:
        sys.setprofile(None)
    return found


def test_a_plain_chat_passes_no_room_that_it_does_not_need() -> None:
    with closing(open_runner(BUNDLED, adapters=AdaptersConfig(slots=2), poison=False)) as runner:
        memory = memory_plan(64, runner.storage.block_size, 256)
        slots = AdapterSlots(2, runner.adapters)
        scheduler = Scheduler(SchedulerConfig(), CacheConfig(), memory, model="m", adapters=slots)
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        prompts = [tuple(range(300, 340)), tuple(range(300, 370))]
        requests = [
            Request(request_id=number, external_id="", prompt_token_ids=prompt, sampling=sampling)
            for number, prompt in enumerate(prompts)
        ]
        found = files_of(scheduler, runner, requests)
        assert {"scheduler/planner.py", "runner/runner.py"} <= found, "both sides are watched"
        assert not [each for each in found if each.startswith(OPTIONAL)]
