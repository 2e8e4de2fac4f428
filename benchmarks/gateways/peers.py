"""Starts what is measured: our whole stack, the back end alone, Envoy before it, LiteLLM before it."""

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
from typing import Any

import httpx
import msgspec
import yaml

from benchmarks.gateways.load import Peer
from benchmarks.stack import python_of
from services.supervisor.edge import envoy_binary
from services.supervisor.state import RunState, read_state

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
    """The whole stack with a simulated engine, stopped at the end; of another checkout with its `.venv`."""
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        config = Path(folder) / "millrace.toml"
        config.write_text(_CONFIG.format(step_ms=step_ms, overlap="on" if step_ms else "off"))
        command = [python_of(checkout), "-m", "services.cli", "up", "--simulated", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--config", str(config)],
            stdout=subprocess.DEVNULL,
            cwd=checkout,
            env={**os.environ, "MILLRACE_STATE_DIR": folder},
        )
        try:
            limit_s = time.monotonic() + _START_LIMIT_S
            while (state := read_state(Path(folder))) is None:
                if process.poll() is not None or time.monotonic() > limit_s:
                    raise SystemExit("the stack did not start; run `millrace up --simulated` to see why")
                time.sleep(0.1)
            yield state
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def own(state: RunState) -> tuple[Peer, list[tuple[str, int]]]:
    """Our stack as a peer, with its processes."""
    host, _, port = state.address.rpartition(":")
    peer = Peer("millrace", host, int(port), state.api_key, state.model)
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
    return Peer("direct", "127.0.0.1", port, "none", "echo")


@contextmanager
def envoy(backend_port: int) -> Iterator[Peer]:
    """An Envoy that does nothing but forward."""
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        config = Path(folder) / "envoy.yaml"
        config.write_text(yaml.safe_dump(_forwarding(port, backend_port)))
        command = [str(envoy_binary()), "-c", str(config), "--use-dynamic-base-id"]
        with _process([*command, "--concurrency", "2", "--log-level", "error"], port):
            yield Peer("envoy", "127.0.0.1", port, "none", "echo")


@contextmanager
def chain() -> Iterator[Peer]:
    """An Envoy before the hops of our path, without the work; see benchmarks.gateways.chain."""
    command = [sys.executable, "-m", "benchmarks.gateways.chain"]
    tokenizer, engine, front = _free_port(), _free_port(), _free_port()
    services = ["--services", str(tokenizer), str(engine)]
    with (
        _process([*command, "service", "--port", str(tokenizer)], tokenizer),
        _process([*command, "service", "--port", str(engine), "--core"], engine),
        _process([*command, "front", "--port", str(front), *services], front),
        envoy(front) as peer,
    ):
        yield msgspec.structs.replace(peer, name="chain")


def _forwarding(port: int, backend_port: int) -> dict[str, Any]:
    def address(number: int) -> dict[str, Any]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    filters = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "router", "typed_config": {"@type": f"{filters}.http.router.v3.Router"}}
    manager = {
        "@type": f"{filters}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "http_filters": [router],
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "backend", "timeout": "0s"}}],
                }
            ]
        },
    }
    endpoint = {"endpoint": {"address": address(backend_port)}}
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": address(port),
                    "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
                }
            ],
            "clusters": [
                {
                    "name": "backend",
                    "load_assignment": {
                        "cluster_name": "backend",
                        "endpoints": [{"lb_endpoints": [endpoint]}],
                    },
                }
            ],
        }
    }


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
        yield {name: Peer("litellm", "127.0.0.1", port, _LITELLM_KEY, name) for name in ports}


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
