"""Processes that stand still, against those that are busy."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from runtime import hang as hang_module
from runtime.hang import NUM_CHECKS, ProcessSilence, Silence
from services.supervisor.health import wait_hung
from services.supervisor.process import ChildProcess, ProcessSpec

LIMIT_S = 30.0
SILENCE_S = 0.5
BUSY_LIMIT_S = 3600.0

COMPUTES = """
print("ready part", flush=True)
while True:
    pass
"""
ANSWERS = """
import http.server
server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
print(f"ready part http={server.server_port}", flush=True)
server.serve_forever()
"""


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Callable[[str], ChildProcess]]:
    started: list[ChildProcess] = []

    def make(program: str) -> ChildProcess:
        spec = ProcessSpec(name="part", argv=(sys.executable, "-c", program))
        started.append(ChildProcess(spec, tmp_path / "part.log", {}))
        return started[-1]

    yield make
    for each in started:
        each.kill()


async def test_a_peer_that_speaks_is_not_dead() -> None:
    silence = Silence(SILENCE_S)
    told = asyncio.create_task(silence.lasts())
    num_heard = 0
    while num_heard < 3:
        await until(lambda: silence.num_silent >= NUM_CHECKS // 2)
        silence.heard()
        num_heard += 1
    assert not told.done()
    assert await asyncio.wait_for(told, LIMIT_S) == "it said nothing for 0.5 s"


async def test_a_process_that_computes_is_left_alone_until_it_is_stopped(
    start: Callable[[str], ChildProcess],
) -> None:
    part = start(COMPUTES)
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    silence = ProcessSilence(SILENCE_S, part.pid, BUSY_LIMIT_S)
    told = asyncio.create_task(silence.lasts())
    await until(lambda: silence.num_silent > 3 * NUM_CHECKS)
    assert not told.done()
    psutil.Process(part.pid).send_signal(signal.SIGSTOP)
    assert "said nothing" in await asyncio.wait_for(told, LIMIT_S)


async def test_what_computes_for_too_long_is_dead(start: Callable[[str], ChildProcess]) -> None:
    part = start(COMPUTES)
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    silence = ProcessSilence(SILENCE_S, part.pid, 4 * SILENCE_S)
    assert await asyncio.wait_for(silence.lasts(), LIMIT_S) == "it said nothing for 2 s"


async def test_work_of_children_is_work_of_who_waits_for_them(start: Callable[[str], ChildProcess]) -> None:
    part = start(
        "import subprocess, sys\n"
        "print('ready part', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'while True: pass'])"
    )
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    await until(lambda: psutil.Process(part.pid).children())
    waits = ProcessSilence(SILENCE_S, part.pid, BUSY_LIMIT_S, waits_for_children=True)
    told = asyncio.create_task(waits.lasts())
    alone = ProcessSilence(SILENCE_S, part.pid, BUSY_LIMIT_S)
    assert await asyncio.wait_for(alone.lasts(), LIMIT_S)
    await until(lambda: waits.num_silent > 2 * NUM_CHECKS)
    assert not told.done()
    told.cancel()


async def test_a_process_whose_children_come_and_go_is_left_alone(
    start: Callable[[str], ChildProcess],
) -> None:
    # Short children, like a compiler's: the processor time of each is gone with it.
    part = start(
        "import subprocess, sys\n"
        "print('ready part', flush=True)\n"
        "while True: subprocess.run([sys.executable, '-S', '-c', 'sum(range(2000000))'])"
    )
    await part.start()
    await asyncio.wait_for(part.wait_ready_line(), LIMIT_S)
    silence = ProcessSilence(SILENCE_S, part.pid, BUSY_LIMIT_S, waits_for_children=True)
    told = asyncio.create_task(silence.lasts())
    await until(lambda: silence.num_silent > 8 * NUM_CHECKS)
    assert not told.done()
    told.cancel()


def test_what_a_child_that_has_ended_wanted_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child computes in the first half and is gone in the second, whose parent has wanted little."""
    silence = ProcessSilence(SILENCE_S, 1, BUSY_LIMIT_S, waits_for_children=True)
    monkeypatch.setattr(hang_module, "_is_at_work", lambda process: False)
    halves = iter([{1: 5.0, 2: 3.0}, {1: 5.001}, {1: 5.001}, {1: 5.002}])
    monkeypatch.setattr(silence, "_wanted_s", lambda: next(halves))
    answers = []
    for check in range(1, 2 * NUM_CHECKS + 1):
        silence.num_silent = check
        answers.append(silence.is_dead())
    # In the next silence there was nothing.
    assert (answers[NUM_CHECKS - 1], answers[2 * NUM_CHECKS - 1]) == (False, True)


async def test_a_stopped_process_that_answered_is_noticed(start: Callable[[str], ChildProcess]) -> None:
    part = start(ANSWERS)
    await part.start()
    port = (await asyncio.wait_for(part.wait_ready_line(), LIMIT_S))["http"]
    # Whatever it answers (this one that it knows no GET), it is alive.
    part.spec = ProcessSpec(name="part", argv=part.spec.argv, health_url=f"http://127.0.0.1:{port}/")
    hung = asyncio.create_task(wait_hung(part, 2.0))
    await until(lambda: "GET" in part.log_path.read_text())
    assert not hung.done()
    psutil.Process(part.pid).send_signal(signal.SIGSTOP)
    assert "said nothing" in await asyncio.wait_for(hung, LIMIT_S)
