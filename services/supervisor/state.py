"""The state file: what runs, where, and how the command line reaches it."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import psutil

from runtime.errors import ConfigError

FILE_NAME = "run.json"


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One running process."""

    name: str
    pid: int
    # Addresses by purpose: grpc, http, metrics, admin.
    addresses: dict[str, str] = {}


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """One running stack."""

    # Process id of the supervisor with its start time, since ids are used again.
    pid: int
    pid_created_unix_s: float
    # Clients connect here, with "http" or "https".
    address: str
    scheme: str = "http"
    api_key: str
    model: str
    trace_store: str
    # Configuration file and environment of the processes, so that other commands see the same settings.
    config: str = ""
    environment: dict[str, str] = {}
    processes: tuple[ProcessState, ...] = ()

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.pid_created_unix_s) < 1.0
        except psutil.NoSuchProcess:
            return False


def read_state(directory: Path) -> RunState | None:
    """The stack that runs with this state directory; None when there is none. A stale file counts as none."""
    try:
        state = msgspec.json.decode((directory / FILE_NAME).read_bytes(), type=RunState)
    except (OSError, msgspec.DecodeError):
        return None
    return state if state.alive else None


def write_state(directory: Path, state: RunState) -> None:
    """Replaces the state file. Only its owner may read it: it holds the development key."""
    temporary = directory / f"{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(state), indent=2))
    temporary.replace(directory / FILE_NAME)


def remove_state(directory: Path) -> None:
    """Removes the state file if it is there."""
    (directory / FILE_NAME).unlink(missing_ok=True)


def require_none_running(directory: Path) -> None:
    """Raises ConfigError when a stack already runs with this state directory, or none can."""
    if (directory / FILE_NAME).is_dir():
        raise ConfigError(f"{directory / FILE_NAME} is a directory, where a file belongs; move it away")
    state = read_state(directory)
    if state is not None:
        raise ConfigError(
            f"a stack already runs on {state.address} (process {state.pid}, state in {directory}); stop it, "
            "or give this one its own directory with MILLRACE_STATE_DIR"
        )


def own_create_time() -> float:
    """Start time of this process, seconds since the Unix epoch."""
    return float(psutil.Process().create_time())
