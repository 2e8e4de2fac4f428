"""`[supervisor]`, and what one command line adds to it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

# Root of the repository, which holds the bundled model and the default configuration.
ROOT = Path(__file__).resolve().parents[2]
DEFAULT_CONFIG = ROOT / "config" / "millrace.toml"
BUNDLED_MODEL = ROOT / "models" / "millrace-nano"

# Key of the development tenant; accepted only on loopback.
DEVELOPMENT_KEY = "mr-dev-local"

_DEVELOPMENT_KEY_VARIABLE = "MILLRACE_DEV_KEY"
_STATE_VARIABLE = "MILLRACE_STATE_DIR"


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[supervisor]`: how many processes `millrace up` starts, and how patient it is with them."""

    engines: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    gateways: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    # A process that is not ready after so long has failed to start. Loading a large model takes minutes.
    start_limit_s: Annotated[float, msgspec.Meta(gt=0)] = 900.0
    # Streams in flight at SIGTERM may go on for this long.
    drain_limit_s: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    # A process that ended is started again after this delay, doubled at every failure in a row ...
    restart_delay_s: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    # ... up to this one: what kept it from starting (a full disk) may be over any time.
    max_restart_delay_s: Annotated[float, msgspec.Meta(gt=0)] = 3.0
    # How the kernel schedules the processes (Linux). "batch": one that is woken does not interrupt another,
    # which saves a fourth of the processor time of short requests where cores are few; but it waits for
    # whatever else computes. "auto" is batch with simulated engines, where it was measured, and normal with
    # all others: what feeds a device must not wait for foreign load.
    scheduling: Literal["auto", "batch", "normal"] = "auto"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says. None leaves it to the configuration file."""

    config: Path | None = None
    model: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    engines: int | None = None
    gateways: int | None = None
    host: str = "127.0.0.1"
    port: int = 8080
    simulated: bool = False


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where logs, traces and state are: MILLRACE_STATE_DIR, or .millrace in the working directory."""
    return Path(environ.get(_STATE_VARIABLE) or ".millrace").absolute()


def development_key(environ: Mapping[str, str] = os.environ) -> str:
    """The key that local requests carry: MILLRACE_DEV_KEY, or the well-known one."""
    return environ.get(_DEVELOPMENT_KEY_VARIABLE) or DEVELOPMENT_KEY
