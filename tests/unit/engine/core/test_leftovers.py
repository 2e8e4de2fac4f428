"""A request that has ended leaves nothing to the garbage collector, whose looks hold up every step."""

from __future__ import annotations

import gc
import socket

import pytest

from contract.frames import FrameBuffer
from engine.config import CacheConfig, SchedulerConfig, SimulatedConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.core.messages import CoreSocket, encode
from engine.runner.simulated import SimulatedRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from tests.unit.engine.driver import memory_plan

NUM_REQUESTS = 20
POISON_ID = 7


class CountingScheduler(Scheduler):
    """Knows whether all that was sent has arrived."""

    num_submitted = 0

    def submit(self, request: Request, now: float, *, waited_for: str = "") -> None:
        self.num_submitted += 1
        super().submit(request, now, waited_for=waited_for)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("sampling", "last_prompt", "cancelled"),
    [
        ({}, (1, 2, 3), False),
        ({"n": 2, "best_of": 2}, (1, 2, 3), False),
        ({"n": 1, "best_of": 3}, (1, 2, 3), False),
        ({"n": 2, "beam_width": 3}, (1, 2, 3), False),
        ({"n": 2, "best_of": 2}, (1, 2, 3), True),
        ({}, (1, POISON_ID), False),
    ],
)
def test_requests_leave_nothing_to_the_collector(
    sampling: dict[str, int], last_prompt: tuple[int, ...], cancelled: bool, overlap: bool
) -> None:
    front, core = socket.socketpair()
    # Room for what a test says before it reads.
    for each in (front, core):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with front, core:
        scheduler = CountingScheduler(
            SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
            CacheConfig(),
            memory_plan(64, 4, 128),
            model="m",
        )
        runner = SimulatedRunner(SimulatedConfig(step_ms=0, poison_token_id=POISON_ID))
        loop = EngineLoop(scheduler, runner, CoreSocket(core), overlap=overlap)

        def serve(first_id: int) -> None:
            for request_id in range(first_id, first_id + NUM_REQUESTS):
                params = SamplingParams(max_tokens=6, **sampling)  # type: ignore[arg-type]
                prompt = (1, 2, 3) if request_id % NUM_REQUESTS else last_prompt
                request = Request(
                    request_id=request_id, external_id="", prompt_token_ids=prompt, sampling=params
                )
                front.sendall(encode(messages.Submit(request)))
            while True:
                loop.step()
                assert not loop.stopped
                if cancelled and scheduler.num_requests:
                    for request_id in list(scheduler._state.groups):
                        front.sendall(encode(messages.Cancel(request_id)))
                FrameBuffer().feed(front.recv(1 << 22))
                if scheduler.num_submitted < first_id + NUM_REQUESTS - 1:
                    continue
                if not scheduler.has_work and not scheduler._state.in_flight:
                    return

        serve(1)
        # What is there already is not looked at.
        gc.freeze()
        gc.disable()
        try:
            serve(1 + NUM_REQUESTS)
            assert gc.collect() == 0
        finally:
            gc.unfreeze()
            gc.enable()
