"""Commands that other packages own: run as their modules, with the settings of the running stack."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from runtime.config import MODELS_FILE_VARIABLE, read_tables
from runtime.errors import ConfigError
from services.cli.target import KEY_VARIABLE, URL_VARIABLE, find_target, running_stack
from services.supervisor import checkpoint
from services.supervisor.config import BUNDLED_MODEL, DEFAULT_CONFIG, state_directory

_LAST_REQUEST = "last-request"
# Whatever is older has its trace, or gets none.
_RECENT_S = 60.0


def run_module(
    module: str,
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    settings: Mapping[str, str] | None = None,
) -> int:
    """Runs `python -m module` in the foreground and returns its exit status.

    `settings` are overrides that the command line gives; they win over everything.
    """
    return _run(module, arguments, {**stack_environment(environ), **(settings or {})})


def run_configured(module: str, arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> int:
    """`run_module` for one that takes `--config`: the file that is named, else the running stack's, else the
    one that `millrace up` takes. Raises ConfigError for a file that cannot be read.
    """
    arguments, environment = configured(arguments, environ)
    return _run(module, arguments, environment)


def configured(
    arguments: Sequence[str], environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a command that reads a configuration file.

    What was decided for the running stack goes with that stack's own file alone; beside another file, a local
    stack's defaults fill what the file leaves out.
    """
    named, state = _named_config(arguments), running_stack(environ)
    if state is not None and (named is None or _is_file(named, state.config)):
        path = Path(state.config) if state.config else None
        settings = dict(state.environment)
    else:
        path = named or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
        settings = _local_settings(read_tables(path, environ), environ)
    added = [] if named or path is None else ["--config", str(path)]
    return [*added, *arguments], {**settings, **environ}


def configured_tables(config: Path | None, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The tables that `configured` names, for a command that runs here. Raises ConfigError."""
    arguments, environment = configured(["--config", str(config)] if config else [], environ)
    return read_tables(_named_config(arguments), environment)


def _named_config(arguments: Sequence[str]) -> Path | None:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    try:
        return cast("Path | None", parser.parse_known_args(list(arguments))[0].config)
    except argparse.ArgumentError:
        # It has no value, which the module itself will say.
        return None


def _is_file(path: Path, other: str) -> bool:
    return bool(other) and path.resolve() == Path(other).resolve()


def _local_settings(tables: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """Where a local stack keeps what `tables` name no file for."""
    directory = state_directory(environ)
    found: dict[str, str] = {}
    for (*parents, key), value in (
        (("keys", "store"), str(directory / "keys.sqlite")),
        (("gateway", "ledger", "url"), f"sqlite:///{directory / 'ledger.sqlite'}"),
        (("observability", "store"), str(directory / "traces.sqlite")),
    ):
        table: Any = tables
        for parent in parents:
            table = table.get(parent, {})
        if key not in table:
            found["MILLRACE_" + "__".join((*parents, key)).upper()] = value
    return found


def _run(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    command = [sys.executable, "-P", "-m", module, *arguments]
    try:
        return subprocess.run(command, env=environment, check=False, umask=0o077).returncode
    except KeyboardInterrupt:
        return 130


def stack_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with the running stack's settings, or with the defaults of a local one."""
    state = running_stack(environ)
    return {**(_local_settings({}, environ) if state is None else state.environment), **environ}


def model_settings(
    model: str,
    dtype: str | None,
    quantize: str | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    config: Path | None = None,
) -> dict[str, str]:
    """Overrides that choose a checkpoint: the named one, which may be a model of the file `config`, else the
    one that is configured there or runs, else the bundled one.

    Raises ConfigError when the named one cannot be found, and where the file has several and none is named.
    """
    chosen = {"MILLRACE_ENGINE__DTYPE": dtype, "MILLRACE_ENGINE__QUANTIZE": quantize}
    settings = {key: value for key, value in chosen.items() if value}
    model, name = _of_file(model, {} if config is None else read_tables(config, environ), config)
    if name:
        settings["MILLRACE_MODEL__NAME"] = json.dumps(name)
    if model:
        path = checkpoint.resolve(model, weights=False)
    elif stack_environment(environ).keys() & {"MILLRACE_MODEL__PATH", MODELS_FILE_VARIABLE}:
        return settings
    else:
        path = BUNDLED_MODEL
    return {**settings, "MILLRACE_MODEL__PATH": json.dumps(str(path))}


def _of_file(model: str, tables: Mapping[str, Any], config: Path | None) -> tuple[str, str]:
    """The path of what is called `model` in a file of several models, and its name there; where nothing is
    named, the only model of the file. What is called otherwise stays as it is.
    """
    models = tables.get("models", {})
    if not model and not models:
        return tables.get("model", {}).get("path", ""), ""
    if not model and len(models) > 1:
        names = ", ".join(models)
        raise ConfigError(f"{config}: it has several models; name one of them with --model: {names}")
    name = model or next(iter(models))
    if name not in models:
        return model, ""
    if not models[name].get("path"):
        raise ConfigError(f"{config}: models.{name}.path is missing; say where its checkpoint is")
    return str(models[name]["path"]), name


def trace_store(environ: Mapping[str, str] = os.environ) -> str:
    """Database of spans of the running stack, or the one that the last stack left."""
    state = running_stack(environ)
    return (state.trace_store if state else "") or str(state_directory(environ) / "traces.sqlite")


def remember_request(request_id: str, environ: Mapping[str, str] = os.environ) -> None:
    """Notes the request that was sent last from here: `trace last` waits for its trace."""
    # Where only a server elsewhere is used, there is no state directory, and there are no traces here either.
    if running_stack(environ) is not None:
        note = state_directory(environ) / _LAST_REQUEST
        note.touch(0o600)
        note.write_text(request_id, encoding="utf-8")


def last_request(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The option with which `last` waits for the request that was just sent from here; none without one."""
    note = state_directory(environ) / _LAST_REQUEST
    try:
        is_recent = time.time() - note.stat().st_mtime < _RECENT_S
        return ["--after", note.read_text(encoding="utf-8")] if is_recent else []
    except OSError:
        return []


def asking(arguments: Sequence[str], environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Environment of a command that asks the server of `--url`, else the running stack's, where there is one,
    with the key that goes to it. Raises ConfigError for a URL that cannot be one.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--url", default="")
    try:
        url = parser.parse_known_args(list(arguments))[0].url
    except argparse.ArgumentError:
        # It has no value, which the module itself will say.
        return environ
    if not url and running_stack(environ) is None:
        return environ
    target = find_target(url, environ)
    return {**environ, URL_VARIABLE: target.url, KEY_VARIABLE: target.api_key}


def metrics_targets(environ: Mapping[str, str] = os.environ, *, kind: str = "") -> list[str]:
    """Options that name every Prometheus endpoint of the running stack, or those of one kind of service; none
    when there is no stack.
    """
    state = running_stack(environ)
    processes = state.processes if state else ()
    return [
        f"--target={process.name}={process.addresses['metrics']}"
        for process in processes
        if "metrics" in process.addresses and process.name.startswith(kind)
    ]
