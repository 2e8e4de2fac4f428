"""A stack that runs without a terminal: `up --detach`, `status` and `stop`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.table import Table

from runtime.errors import ConfigError
from services.cli.target import running_stack
from services.supervisor.config import make_private, state_directory
from services.supervisor.state import RunState, require_none_running

_PAUSE_S = 0.1


def detach(arguments: Sequence[str], console: Console) -> int:
    """Runs the command line `arguments` on its own until its stack is healthy; the exit status.

    What it prints is in logs/supervisor.log of the state directory, and is shown until then.
    """
    state = state_directory()
    require_none_running(state)
    make_private(state)
    log = state / "logs" / "supervisor.log"
    log.parent.mkdir(exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "services.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    console.print(f"what it says from now on is in {log}", markup=False, soft_wrap=True)
    with log.open(encoding="utf-8", errors="replace") as said:
        try:
            while process.poll() is None:
                # Kernels may be compiled meanwhile, for a minute and more.
                sys.stderr.write(said.read())
                sys.stderr.flush()
                stack = running_stack()
                if stack is not None and stack.pid == process.pid:
                    return _show(stack, console)
                time.sleep(_PAUSE_S)
        except KeyboardInterrupt:
            # It has a session of its own, which Ctrl-C does not reach.
            process.terminate()
            process.wait()
            return 130
        sys.stderr.write(said.read())
    return process.returncode or 1


def _show(stack: RunState, console: Console) -> int:
    console.print(
        f"{stack.model} is served on {stack.scheme}://{stack.address} (process {stack.pid}); "
        "`millrace status` shows it, `millrace stop` ends it",
        markup=False,
        soft_wrap=True,
    )
    return 0


def status(console: Console) -> None:
    """Prints what runs; raises ConfigError when nothing does."""
    stack = _required()
    _show(stack, console)
    table = Table.grid(padding=(0, 2))
    for process in stack.processes:
        state = "runs" if psutil.pid_exists(process.pid) else "is being started again"
        addresses = "  ".join(f"{purpose} {address}" for purpose, address in process.addresses.items())
        table.add_row(process.name, str(process.pid), state, addresses)
    console.print(table, soft_wrap=True)


def stop(console: Console) -> None:
    """Has the stack drain and returns when it has ended; raises ConfigError when there is none."""
    stack = _required()
    supervisor = psutil.Process(stack.pid)
    supervisor.terminate()
    console.print("stopping; streams in flight may finish", markup=False)
    supervisor.wait()
    console.print("stopped", markup=False)


def _required() -> RunState:
    stack = running_stack()
    if stack is None:
        raise ConfigError(
            f"no stack runs with the state directory {state_directory()}; start one with `millrace up "
            "--detach`, or name its directory with MILLRACE_STATE_DIR"
        )
    return stack
