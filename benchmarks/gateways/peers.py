"""Starts what is measured: our whole stack, and the back end alone."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.gateways.load import Peer
from benchmarks.stack import running_stack
from services.supervisor.ports import free_ports
from services.supervisor.state import RunState

_START_LIMIT_S = 30.0
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
def millrace(
    step_ms: float, checkout: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[RunState]:
    """The whole stack with a simulated engine; of another checkout with its `.venv`."""
    config = _CONFIG.format(step_ms=step_ms, overlap="on" if step_ms else "off")
    with running_stack(config, "--simulated", environment=environment, checkout=checkout) as stack:
        yield stack.state


def own(state: RunState) -> tuple[Peer, list[tuple[str, int]]]:
    """Our stack as a peer, with its processes."""
    peer = Peer("millrace", f"http://{state.address}", state.api_key, state.model)
    return peer, [(each.name, each.pid) for each in state.processes]


@contextmanager
def backend(step_ms: float) -> Iterator[Peer]:
    """The back end itself."""
    (port,) = free_ports(1, "127.0.0.1")
    command = [sys.executable, "-m", "benchmarks.gateways.backend", "--port", str(port)]
    process = subprocess.Popen([*command, "--step-ms", str(step_ms)])
    try:
        limit_s = time.monotonic() + _START_LIMIT_S
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > limit_s:
                raise SystemExit("the back end did not start; its message is above")
            time.sleep(0.05)
        yield Peer("direct", f"http://127.0.0.1:{port}", "none", "echo")
    finally:
        process.terminate()
        process.wait()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
