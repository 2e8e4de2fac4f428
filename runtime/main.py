"""How a service's process begins: one option, one configuration file, one line when it cannot be used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias

import uvloop

from observability.emit import logging as json_logging
from observability.emit.config import ObservabilityConfig
from runtime import models
from runtime.config import load_section
from runtime.errors import ConfigError
from runtime.models import Source

EXIT_CONFIG = 2

# Given all tables and `[observability]`; serves until SIGTERM or SIGINT and returns the exit code.
Serve: TypeAlias = Callable[[dict[str, Any], ObservabilityConfig], Coroutine[Any, Any, int]]


def run(module: str, service: str, about: str | None, serve: Serve) -> int:
    """Exit code of `serve`, or 2 when it raises ConfigError. `service` is what logs say, `about` what --help
    says.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    arguments = parser.parse_args()
    try:
        tables = models.use(Source(arguments.config)).read()
        config = load_section(tables, "observability", ObservabilityConfig)
        json_logging.configure(service, config.log_level)
        return uvloop.run(serve(tables, config))
    except ConfigError as error:
        print(f"python -m {module}: {error}", file=sys.stderr)
        return EXIT_CONFIG


def say_ready(service: str, **facts: str) -> None:
    """The line that the supervisor waits for: addresses and what else it shows, empty ones left out."""
    shown = " ".join(f"{name}={fact}" for name, fact in facts.items() if fact)
    print(f"ready {service} {shown}", flush=True)
