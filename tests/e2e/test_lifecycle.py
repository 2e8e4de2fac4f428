"""Starting, surviving and ending: the stack as a group of processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from services.supervisor.config import BUNDLED_MODEL
from services.supervisor.state import read_state
from tests.e2e.stack import (
    CONFIG,
    LIMIT_S,
    START_LIMIT_S,
    Stack,
    assert_gone,
    eventually,
    raw,
    running_stack,
    start_stack,
)

# Slow enough that a stream is under way when something happens to it, deterministic, and without weights.
PACE = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}
NUM_TOKENS = 60


@pytest.fixture
def simulated(tmp_path: Path):  # type: ignore[no-untyped-def]
    with running_stack(tmp_path, "--simulated", environment=PACE) as stack:
        yield stack


def stream_tokens(stack: Stack, started: threading.Event) -> tuple[int, str | None]:
    """Reads one stream to its end: number of completion tokens, and why it ended."""
    with stack.openai() as client:
        stream = client.completions.create(
            model=stack.model,
            prompt=[300, 301, 302],
            max_tokens=NUM_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        reason, count = None, 0
        for chunk in stream:
            started.set()
            if chunk.choices and chunk.choices[0].finish_reason:
                reason = chunk.choices[0].finish_reason
            if chunk.usage:
                count = chunk.usage.completion_tokens
        return count, reason


class Background:
    """One call in another thread, with its result."""

    def __init__(self, stack: Stack) -> None:
        self.started = threading.Event()
        self.result: tuple[int, str | None] | None = None
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(stack,))
        self._thread.start()
        assert self.started.wait(LIMIT_S), stack.transcript()

    def _run(self, stack: Stack) -> None:
        try:
            self.result = stream_tokens(stack, self.started)
        except BaseException as error:
            self.failure = error
            self.started.set()

    def finish(self) -> tuple[int, str | None] | None:
        self._thread.join(LIMIT_S)
        if self.failure is not None:
            raise self.failure
        return self.result


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


@pytest.mark.parametrize("name", ["engine-0", "gateway-0", "tokenizer", "envoy", "collector"])
def test_process_that_dies_is_started_again(simulated: Stack, name: str) -> None:
    before = simulated.pid(name)
    os.kill(before, signal.SIGKILL)
    assert eventually(lambda: f"{name} is ready again" in simulated.output.read_text()), (
        simulated.transcript()
    )
    assert simulated.pid(name) != before
    assert f"{name} ended with signal SIGKILL" in simulated.output.read_text()

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
        os.kill(simulated.pid("tokenizer"), signal.SIGKILL)
        again = eventually(lambda: "tokenizer is ready again" in simulated.output.read_text())
        stop.set()
    assert again, simulated.transcript()
    statuses = [status for each in asking for status in each.result()]
    assert set(statuses) == {200}, statuses


def test_healthy_means_that_the_edge_knows_every_gateway(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--gateways", "3") as stack:
        (admin,) = stack.addresses("envoy", "admin")
        page = httpx.get(f"http://{admin}/clusters", params={"format": "json"}, trust_env=False).json()
        healthy = {
            each["name"]: [host["health_status"] for host in each["host_statuses"]]
            for each in page["cluster_statuses"]
            if each["name"].startswith("gateway_")
        }
        assert len(healthy) >= 2
        assert all(found == [{"eds_health_status": "HEALTHY"}] * 3 for found in healthy.values()), healthy


def test_several_engines_and_gateways(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--engines", "2", "--gateways", "2") as stack:
        assert len(stack.addresses("engine", "grpc")) == len(stack.addresses("gateway", "grpc")) == 2
        results = [stream_tokens(stack, threading.Event()) for _ in range(4)]
        assert results == [(NUM_TOKENS, "length")] * 4
        stack.assert_nothing_leaked()


@pytest.mark.parametrize(
    "garbage",
    [b"\x00" * 4096, b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 512],
)
def test_garbage_on_the_port_harms_nobody(simulated: Stack, garbage: bytes) -> None:
    host, _, port = simulated.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=LIMIT_S) as connection:
        connection.sendall(garbage)
        while connection.recv(4096):
            pass
    assert stream_tokens(simulated, threading.Event()) == (NUM_TOKENS, "length")


def test_client_that_vanishes_in_mid_request_harms_nobody(simulated: Stack) -> None:
    host, _, port = simulated.address.rpartition(":")
    for _ in range(10):
        connection = socket.create_connection((host, int(port)), timeout=LIMIT_S)
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"authorization: Bearer mr-dev-local\r\ncontent-type: application/json\r\n\r\n{"
        )
        connection.close()
    assert stream_tokens(simulated, threading.Event()) == (NUM_TOKENS, "length")
    simulated.assert_nothing_leaked()


def test_open_to_the_network_there_is_no_development_key(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--simulated", "--host", "0.0.0.0") as stack:
        assert "mr-dev-local" not in stack.output.read_text()
        with pytest.raises(openai.AuthenticationError):
            stack.openai("mr-dev-local").models.list()
        created = subprocess.run(
            [sys.executable, "-m", "services.cli", "keys", "create", "--tenant", "development"],
            env={**os.environ, "MILLRACE_STATE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        key = created.stdout.split()[0]

        def accepted() -> bool:
            try:
                return bool(stack.openai(key).models.list().data)
            except openai.AuthenticationError:
                return False

        assert eventually(accepted)


# --- refusals before anything starts ----------------------------------------------------------------------


def run_up(tmp_path: Path, *arguments: str, environment: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    return subprocess.run(
        [sys.executable, "-m", "services.cli", "up", *arguments],
        env={**os.environ, "MILLRACE_STATE_DIR": str(tmp_path), "COLUMNS": "500", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=START_LIMIT_S,
        check=False,
    )


def test_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run_up(tmp_path, "--port", str(taken.getsockname()[1]), "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert "--port" in result.stdout + result.stderr


def test_second_stack_in_the_same_place_is_refused(simulated: Stack) -> None:
    result = run_up(simulated.directory, "--port", "0", "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert "already runs" in result.stdout + result.stderr
    assert simulated.openai().models.list().data


def test_mistake_in_a_services_configuration_is_one_clear_message(tmp_path: Path) -> None:
    config = tmp_path / "bad.toml"
    config.write_text(CONFIG.replace("[gateway]", "[engine]\nnum_thread = 1\n[gateway]"))
    result = run_up(tmp_path, "--port", "0", "--config", str(config), "--model", str(BUNDLED_MODEL))
    assert result.returncode == 2
    assert (result.stdout + result.stderr).splitlines() == [
        "millrace: engine.num_thread: Object contains unknown field `num_thread`"
    ]


def test_failed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "millrace.toml").write_text(CONFIG)
    # Every service starts, and the tokenizer cannot: its file is cut off.
    model = tmp_path / "model"
    shutil.copytree("models/millrace-nano", model)
    whole = (model / "tokenizer.json").read_bytes()
    (model / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    stack = start_stack(tmp_path, "--simulated", "--model", str(model))
    seen: dict[int, psutil.Process] = {}
    while stack.process.poll() is None:
        try:
            seen |= {each.pid: each for each in stack.all_processes()}
        except psutil.NoSuchProcess:
            break
    assert stack.process.wait(START_LIMIT_S) != 0
    assert_gone(list(seen.values()))
    assert "tokenizer" in stack.output.read_text()
