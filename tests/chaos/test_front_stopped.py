"""An engine's front stands still and wakes, with nobody to kill it: it finds itself replaced."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from contract.engines import CancelReason
from contract.sampling import SamplingParams
from gateway.config import RoutingConfig
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import Submission
from runtime.config import HealthConfig
from tests.unit.engine.checked_runner import expected_token
from tests.unit.engine.service.engine_client import Engine, signed, start_engine

pytestmark = pytest.mark.e2e

PROMPT = tuple(range(10, 50))
NUM_TOKENS = 600
LIMIT_S = 60.0


async def test_a_front_that_wakes_speaks_no_more() -> None:
    settings = {"SIMULATION__STEP_MS": "10"}
    async with start_engine(**settings) as one, start_engine(**settings) as other:
        fleet = Fleet(
            gateway="g",
            fingerprint=lambda: "vocabulary",
            routing=RoutingConfig(),
            silence_limit_s=HealthConfig().silence_limit_s,
        )
        await fleet.set_targets([one.target, other.target])
        while len(fleet.ready) < 2:
            await fleet.wait_change(1.0)
        try:
            async with asyncio.timeout(LIMIT_S):
                await _stop_and_wake(fleet, {each.target: each for each in (one, other)})
        finally:
            await fleet.stop()


async def _stop_and_wake(fleet: Fleet, engines: dict[str, Engine]) -> None:
    sampling = SamplingParams(seed=1, max_tokens=NUM_TOKENS)
    stream = ContinuousStream(fleet, Submission(context=signed(), prompt_token_ids=PROMPT, sampling=sampling))
    stream.start()
    stopped = engines[stream.engine]
    tokens: list[int] = []
    while len(tokens) < NUM_TOKENS:
        for output in await stream.take():
            if not tokens:
                os.kill(stopped.process.pid, signal.SIGSTOP)
            tokens += output.token_ids
    assert tokens == [expected_token(PROMPT, 1, 0, position) for position in range(NUM_TOKENS)]
    assert stream.num_losses == 1
    assert stream.engine != stopped.target
    os.kill(stopped.process.pid, signal.SIGCONT)
    # Its core is told that nobody wants the rest, and it serves again.
    books = await stopped.wait_until_idle()
    assert books.ok, books.violation
    assert books.num_runner_states == 0
    while len(fleet.ready) < 2:
        await fleet.wait_change(1.0)
    # Nothing of it came after the end.
    assert not stream._inbox._items
    stream.cancel(CancelReason.CLIENT)
