"""Tables of usage and cost: `millrace usage --by tenant,day`."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from sqlalchemy.exc import SQLAlchemyError

from gateway.ledger.tables import open_ledger
from gateway.ledger.usage import DIMENSIONS, NUMBERS, UsageRow, usage
from gateway.settings import load_settings
from runtime.config import read_tables
from runtime.errors import ConfigError

# Heads of columns that are not simply the name.
_HEADS = {
    "num_requests": "requests",
    "computed_prompt_tokens": "prompt computed",
    "cached_prompt_tokens": "prompt cached",
    "speculative_waste_tokens": "spec. waste",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr."""
    options = _parser().parse_args(arguments)
    by: list[str] = list(dict.fromkeys(options.by.split(","))) if options.by else []
    unknown = [name for name in by if name not in DIMENSIONS]
    if unknown:
        print(f"millrace usage: --by {unknown[0]}: use of {', '.join(DIMENSIONS)}", file=sys.stderr)
        return 2
    try:
        config = load_settings(read_tables(options.config)).gateway.ledger
        if not config.url:
            raise ConfigError('gateway.ledger.url is "": no ledger is kept')
        rows = usage(
            open_ledger(config.url),
            by,
            since_unix_ms=options.since,
            until_unix_ms=options.until,
            tenant=options.tenant,
        )
    except (ConfigError, SQLAlchemyError) as error:
        print(f"millrace usage: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    _PRINTERS[options.format](by, rows)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace usage", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (TOML)")
    parser.add_argument("--by", default="tenant,tier", help=f"any of {', '.join(DIMENSIONS)}; '' sums all")
    parser.add_argument("--since", type=_unix_ms, metavar="2026-11-01", help="first moment, in UTC")
    parser.add_argument("--until", type=_unix_ms, metavar="2026-12-01", help="first moment that is left out")
    parser.add_argument("--tenant", default="", help="this tenant alone")
    parser.add_argument("--format", choices=sorted(_PRINTERS), default="table")
    return parser


def _print_table(by: list[str], rows: list[UsageRow]) -> None:
    table = Table(*by, box=None, header_style="bold")
    # A column of zeros says nothing, and there are many columns.
    shown = [name for name in NUMBERS if any(row.numbers[name] for row in rows)]
    for name in shown:
        head = name.removesuffix("_tokens").replace("_", " ")
        table.add_column(_HEADS.get(name, head), justify="right")
    for row in rows:
        table.add_row(*_group(by, row), *(_text(row.numbers[name]) for name in shown))
    # Piped into a file, a table is as wide as it needs to be.
    Console(width=None if sys.stdout.isatty() else 250).print(table)


def _print_json(by: list[str], rows: list[UsageRow]) -> None:
    print(json.dumps([_flat(by, row) for row in rows], indent=2))


def _print_csv(by: list[str], rows: list[UsageRow]) -> None:
    writer = csv.DictWriter(sys.stdout, [*by, *NUMBERS], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(by, row) for row in rows)


_PRINTERS = {"table": _print_table, "json": _print_json, "csv": _print_csv}


def _flat(by: list[str], row: UsageRow) -> dict[str, Any]:
    return {**dict(zip(by, _group(by, row), strict=True)), **row.numbers}


def _group(by: list[str], row: UsageRow) -> list[str]:
    return [
        datetime.fromtimestamp(value / 1000, UTC).date().isoformat() if name == "day" else str(value)
        for name, value in zip(by, row.group, strict=True)
    ]


def _text(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:,.6g}"


def _unix_ms(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no date; write 2026-11-01 or 2026-11-01T12:00"
        ) from error
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


if __name__ == "__main__":
    sys.exit(main())
