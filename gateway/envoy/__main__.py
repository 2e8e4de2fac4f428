"""Prints Envoy's configuration: `python -m gateway.envoy --config FILE --profile compose > envoy.yaml`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from gateway.envoy.bootstrap import PROFILES, render
from runtime.config import read_tables
from runtime.errors import ConfigError


def main() -> None:
    """Exit code 2 and one line on stderr when the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m gateway.envoy", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--profile", choices=sorted(PROFILES), default="local", help="where Envoy will run")
    arguments = parser.parse_args()
    try:
        sys.stdout.write(render(read_tables(arguments.config), arguments.profile))
    except ConfigError as error:
        print(f"gateway.envoy: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
