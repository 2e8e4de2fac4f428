"""Starts what is measured: our whole stack, the back end alone, LiteLLM before it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import yaml

from benchmarks.gateways.load import Peer
from benchmarks.stack import running_stack
from services.supervisor.state import RunState

_START_LIMIT_S = 120.0
_LITELLM_KEY = "sk-benchmark"
# Limits that are counted and never met. Steps that take time overlap with the planning of the next one, as on
# a GPU: the time is a device's, and planning is no part of it.
_CONFIG = """
[engine.simulation]
step_ms = {step_ms}
[engine.scheduler]
max_num_seqs = 256
overlap = "{overlap}"
[tenants.development]
tokens_per_minute = 1000000000
max_concurrent_streams = 100000
"""


@contextmanager
def millrace(step_ms: float, checkout: Path | None = None) -> Iterator[RunState]:
    """The whole stack with a simulated engine; of another checkout with its `.venv`."""
    config = _CONFIG.format(step_ms=step_ms, overlap="on" if step_ms else "off")
    with running_stack(config, "--simulated", checkout=checkout) as stack:
        yield stack.state


def own(state: RunState) -> tuple[Peer, list[tuple[str, int]]]:
    """Our stack as a peer, with its processes."""
    peer = Peer("millrace", f"http://{state.address}", state.api_key, state.model)
    return peer, [(each.name, each.pid) for each in state.processes]


@contextmanager
def backend(step_ms: float) -> Iterator[int]:
    """The back end, on the port that is given."""
    port = _free_port()
    command = [sys.executable, "-m", "benchmarks.gateways.backend", "--port", str(port)]
    with _process([*command, "--step-ms", str(step_ms)], port):
        yield port


def direct(port: int) -> Peer:
    """The back end itself."""
    return Peer("direct", f"http://127.0.0.1:{port}", "none", "echo")


@contextmanager
def litellm(environment: Path, ports: dict[str, int], workers: int) -> Iterator[dict[str, Peer]]:
    """LiteLLM's proxy from a virtual environment that has `litellm[proxy]`; a peer for each back end.

    It checks a key and keeps no log; without its database it counts neither limits nor costs.
    """
    port = _free_port()
    models = [
        {
            "model_name": name,
            "litellm_params": {
                "model": "openai/echo",
                "api_base": f"http://127.0.0.1:{number}/v1",
                "api_key": "none",
            },
        }
        for name, number in ports.items()
    ]
    settings = {
        "model_list": models,
        "general_settings": {"master_key": _LITELLM_KEY},
        "litellm_settings": {"telemetry": False},
    }
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder, ExitStack() as stack:
        config = Path(folder) / "litellm.yaml"
        config.write_text(yaml.safe_dump(settings))
        command = [str(environment / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1"]
        command += ["--port", str(port), "--num_workers", str(workers)]
        stack.enter_context(_process(command, port, {"LITELLM_LOG": "ERROR", "LITELLM_MODE": "PRODUCTION"}))
        _wait_alive(f"http://127.0.0.1:{port}/health/liveliness")
        yield {name: Peer("litellm", f"http://127.0.0.1:{port}", _LITELLM_KEY, name) for name in ports}


@contextmanager
def _process(
    command: list[str], port: int, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        limit_s = time.monotonic() + _START_LIMIT_S
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > limit_s:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.05)
        yield process
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_alive(url: str) -> None:
    limit_s = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < limit_s:
        try:
            if httpx.get(url, timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"{url} does not answer")


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        number: int = probe.getsockname()[1]
        return number
