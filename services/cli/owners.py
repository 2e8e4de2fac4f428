"""Commands that other packages own: run as their modules, with the settings of the running stack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from services.cli.target import running_stack
from services.supervisor import checkpoint
from services.supervisor.config import BUNDLED_MODEL, state_directory


def run_module(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    settings: Mapping[str, str] | None = None,
) -> int:
    """Runs `python -m module` in the foreground and returns its exit status.

    `settings` are overrides that the command line gives; they win over everything.
    """
    command = [sys.executable, "-P", "-m", module, *arguments]
    environment = {**stack_environment(environ), **(settings or {})}
    try:
        return subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        return 130


def stack_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the running stack's settings, or with the defaults of a local one."""
    state = running_stack(environ)
    if state is not None:
        return {**state.environment, **environ}
    directory = state_directory(environ)
    local = {
        "MILLRACE_KEYS__STORE": str(directory / "keys.sqlite"),
        "MILLRACE_GATEWAY__LEDGER__URL": f"sqlite:///{directory / 'ledger.sqlite'}",
        "MILLRACE_OBSERVABILITY__STORE": str(directory / "traces.sqlite"),
    }
    return {**local, **environ}


def model_settings(
    model: str,
    dtype: str | None,
    quantize: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Overrides that choose a checkpoint: the named one, else the configured one, else the bundled one.

    Raises ConfigError when the named one cannot be found.
    """
    chosen = {"MILLRACE_ENGINE__DTYPE": dtype, "MILLRACE_ENGINE__QUANTIZE": quantize}
    settings = {key: value for key, value in chosen.items() if value}
    if model:
        path = checkpoint.resolve(model, weights=False)
    elif "MILLRACE_MODEL__PATH" in stack_environment(environ):
        return settings
    else:
        path = BUNDLED_MODEL
    return {**settings, "MILLRACE_MODEL__PATH": json.dumps(str(path))}


def trace_store(environ: Mapping[str, str] = os.environ) -> str:
    """Database of spans of the running stack, or the one that the last stack left."""
    state = running_stack(environ)
    return (state.trace_store if state else "") or str(state_directory(environ) / "traces.sqlite")


def metrics_targets(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Options that name every Prometheus endpoint of the running stack; none when there is no stack."""
    state = running_stack(environ)
    processes = state.processes if state else ()
    return [
        f"--target={process.name}={process.addresses['metrics']}"
        for process in processes
        if "metrics" in process.addresses
    ]
