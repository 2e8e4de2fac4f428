"""How a stack ends: drained, at once, killed, or before it was healthy."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from services.supervisor.state import read_state
from tests.e2e.stack import (
    CONFIG,
    LIMIT_S,
    START_LIMIT_S,
    Stack,
    assert_gone,
    eventually,
    running_stack,
    start_stack,
)
from tests.e2e.streaming import NUM_TOKENS, PACE, Background


@pytest.fixture
def simulated(tmp_path: Path) -> Iterator[Stack]:
    """One for each test, which ends it."""
    with running_stack(tmp_path, "--simulated", environment=PACE) as stack:
        yield stack


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_while_streaming_lets_the_stream_finish(simulated: Stack, number: signal.Signals) -> None:
    processes = simulated.all_processes()
    background = Background(simulated)
    address = simulated.address
    simulated.process.send_signal(number)
    assert background.finish() == (NUM_TOKENS, "length")
    assert simulated.process.wait(LIMIT_S) == 0, simulated.transcript()
    assert_gone(processes)
    assert read_state(simulated.directory) is None
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{address}/v1/models", trust_env=False)


def test_second_signal_ends_at_once(simulated: Stack) -> None:
    processes = simulated.all_processes()
    background = Background(simulated)
    simulated.process.send_signal(signal.SIGTERM)
    assert eventually(lambda: "Stopping" in simulated.output.read_text())
    simulated.process.send_signal(signal.SIGTERM)
    simulated.process.wait(LIMIT_S)
    assert_gone(processes)
    with pytest.raises((openai.APIError, httpx.HTTPError)):
        background.finish()


def test_no_orphan_after_the_supervisor_is_killed(simulated: Stack) -> None:
    processes = simulated.all_processes()
    assert len(processes) >= 6
    simulated.process.kill()
    simulated.process.wait()
    assert_gone(processes)
    # The state file that is left behind does not stop the next stack.
    with running_stack(simulated.directory, "--simulated") as again:
        assert again.openai().models.list().data


def test_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "millrace.toml").write_text(CONFIG)
    # Every service starts, and the tokenizer cannot: its file is cut off.
    model = tmp_path / "model"
    shutil.copytree("models/millrace-nano", model)
    whole = (model / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    stack = start_stack(tmp_path, "--simulated", model=model)
    seen: dict[int, psutil.Process] = {}
    while stack.process.poll() is None:
        try:
            seen |= {each.pid: each for each in stack.all_processes()}
        except psutil.NoSuchProcess:
            break
    assert stack.process.wait(START_LIMIT_S) != 0
    assert_gone(list(seen.values()))
    assert "tokenizer" in stack.output.read_text()
