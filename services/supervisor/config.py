"""`[supervisor]`, and what one command line adds to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.errors import ConfigError

# Holds the bundled model and the default configuration: a folder of a wheel, or the root of the repository.
_IN_WHEEL = Path(__file__).resolve().parents[1] / "bundled"
ROOT = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_WHEEL.parents[1]
DEFAULT_CONFIG = ROOT / "config" / "millrace.toml"
BUNDLED_MODEL = ROOT / "models" / "millrace-nano"

# Key of the development tenant; accepted only on loopback.
DEVELOPMENT_KEY = "mr-dev-local"

_DEVELOPMENT_KEY_VARIABLE = "MILLRACE_DEV_KEY"
_STATE_VARIABLE = "MILLRACE_STATE_DIR"
# The files of a start: configuration, state, and the first lines of every log.
_NEEDED_BYTES = 256 * 1024
# What a secret has at least.
_MIN_SECRET = 16


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[supervisor]`: how many processes `millrace up` starts, and how patient it is with them."""

    engines: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # Of each model's engines so many compute prompts, and the others answer (engine.role); 0: each does both.
    prefill_engines: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    gateways: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # What engines of models with load = "on demand" may take together, by their memory plans; 0 is
    # engine.cache.memory_fraction of the memory that is free at the start. And how many such models may be
    # loaded at a time; 0 is as many as fit.
    on_demand_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    on_demand_models: Annotated[int, msgspec.Meta(ge=0)] = 0
    # A process that is not ready after so long has failed to start. Loading a large model takes minutes.
    start_limit_s: Annotated[float, msgspec.Meta(gt=0)] = 900.0
    # Streams in flight at SIGTERM may go on for this long.
    drain_limit_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    # A process that ended is started again after this delay, doubled at every failure in a row ...
    restart_delay_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    # ... up to this one: what kept it from starting (a full disk) may be over any time.
    max_restart_delay_s: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    # Metrics of tokenizer, engines and gateways, in this order, are on ports from this one on; 0 takes free
    # ones.
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    # How the kernel schedules the processes (Linux). "batch": one that is woken does not interrupt another,
    # which saves a fourth of the processor time of short requests where cores are few; but it waits for
    # whatever else computes. "auto" is batch with simulated engines, where it was measured, and normal with
    # all others: what feeds a device must not wait for foreign load.
    scheduling: Literal["auto", "batch", "normal"] = "auto"
    # How far engines that compute on processors give way to the gateway and the edge, as nice(1) counts
    # (Linux), because a step takes milliseconds whoever waits, and what a request needs before it takes one.
    # Engines on devices, and simulated ones, do not: little is computed before a device has its next step.
    engine_niceness: Annotated[int, msgspec.Meta(ge=0, le=19)] = 5


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says. None leaves it to the configuration file."""

    config: Path | None = None
    # Paths, or NAME=PATH.
    model: tuple[str, ...] | None = None
    served_model_name: str | None = None
    chat_template: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    quantize: str | None = None
    # NAME=PATH each.
    adapters: tuple[str, ...] = ()
    engines: int | None = None
    gateways: int | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    simulated: bool = False
    # Overrides of [engine] by key.
    engine_settings: Mapping[str, object] = field(default_factory=dict)


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where logs, traces and state are: MILLRACE_STATE_DIR, or .millrace in the working directory."""
    return Path(environ.get(_STATE_VARIABLE) or ".millrace").absolute()


def make_private(directory: Path) -> None:
    """Creates the state directory; what is in it, and what this process and its children write later, is its
    owner's alone. Raises ConfigError when it cannot be written.
    """
    os.umask(0o077)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        directory.chmod(0o700)
        for each in (*directory.glob("*.sqlite*"), *directory.glob("logs/*")):
            each.chmod(0o600)
        with tempfile.TemporaryFile(dir=directory) as file:
            # A full disk takes files, and nothing that is in them.
            file.write(bytes(_NEEDED_BYTES))
            file.flush()
    except OSError as error:
        raise ConfigError(
            f"the state directory {directory} cannot be written: {error.strerror or error}; run in a "
            f"directory of your own with {_NEEDED_BYTES // 1024} KiB free, or name another place with "
            f"{_STATE_VARIABLE}"
        ) from error


def development_key(environ: Mapping[str, str] = os.environ) -> str:
    """The key that local requests carry: MILLRACE_DEV_KEY, or the well-known one."""
    return environ.get(_DEVELOPMENT_KEY_VARIABLE) or DEVELOPMENT_KEY


def kept_secret(directory: Path) -> str:
    """A secret of the state directory, made when it is first asked for. Raises ConfigError."""
    path = directory / "context_secret"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), open(path, "x", opener=_for_the_owner) as file:
            file.write(secrets.token_hex(32))
        secret = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; delete it, and another one is made") from error
    if len(secret) < _MIN_SECRET:
        raise ConfigError(f"{path}: it is not whole; delete it, and another one is made")
    return secret


def _for_the_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
