"""What a stack survives: the death of any of its processes."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.stack import Stack, eventually, raw
from tests.e2e.streaming import NUM_TOKENS, stream_tokens


def is_back_after(stack: Stack, name: str, number: signal.Signals = signal.SIGKILL) -> bool:
    """Kills or stops a process; whether the supervisor says its end, and that it is ready again."""
    said = (f"{name} ended with signal SIGKILL", f"{name} is ready again")
    before = [stack.output.read_text().count(line) for line in said]
    os.kill(stack.pid(name), number)
    return eventually(
        lambda: [stack.output.read_text().count(line) for line in said] == [count + 1 for count in before]
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("name", ["engine-0", "gateway-0", "tokenizer", "envoy", "collector"])
def test_process_that_dies_is_started_again(simulated: Stack, name: str, number: signal.Signals) -> None:
    before = simulated.pid(name)
    assert is_back_after(simulated, name, number), simulated.transcript()
    assert simulated.pid(name) != before

    def served() -> bool:
        try:
            return stream_tokens(simulated, threading.Event()) == (NUM_TOKENS, "length")
        except openai.APIError:
            return False

    assert eventually(served), simulated.transcript()
    simulated.assert_nothing_leaked()


def test_requests_wait_for_a_tokenizer_that_is_started_again(simulated: Stack) -> None:
    """Those that come while it is away, and those that it had begun."""
    stop = threading.Event()

    def ask(_: int) -> list[int]:
        body = f'{{"model": "{simulated.model}", "prompt": "Hello", "max_tokens": 1}}'.encode()
        statuses = []
        while not stop.is_set():
            statuses.append(raw(simulated, "/v1/completions", body).status_code)
        return statuses

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        again = is_back_after(simulated, "tokenizer")
        stop.set()
    assert again, simulated.transcript()
    statuses = [status for each in asking for status in each.result()]
    assert set(statuses) == {200}, statuses


def test_a_state_file_that_cannot_be_written_stops_no_restart(simulated: Stack) -> None:
    """Twice, and the file is true again when it can be written."""
    blocked = simulated.directory / f"run.json.{simulated.process.pid}"
    blocked.mkdir()
    try:
        before = simulated.pid("gateway-0")
        assert is_back_after(simulated, "gateway-0"), simulated.transcript()
        assert simulated.pid("gateway-0") == before
        assert "run.json" in simulated.output.read_text()
        (gateway,) = (
            each
            for each in simulated.all_processes()
            if each.cmdline()[3:4] == ["gateway"] and each.is_running()
        )
        said = simulated.output.read_text().count("gateway-0 is ready again")
        gateway.kill()
        assert eventually(
            lambda: simulated.output.read_text().count("gateway-0 is ready again") == said + 1
        ), simulated.transcript()
    finally:
        blocked.rmdir()
    assert eventually(lambda: simulated.pid("gateway-0") not in {before, gateway.pid})
