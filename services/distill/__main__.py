"""Write answers of a served model as training data: `millrace distill export --model NAME --out FILE`.

Reads the responses that `[gateway.store]` keeps, of tenants whose `[tenants.<name>]` says `training_data
= true` and of nobody else. Each line has the `messages` of a conversation that ends with the model's
answer, with the `tools` that were offered: what `python -m models.recipes.distillation` and most trainers
read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy.exc import SQLAlchemyError

from gateway.settings import Settings, load_settings
from gateway.store.store import Store
from runtime.config import read_tables
from runtime.errors import ConfigError, described
from services.distill.examples import NotWritten, Selection, StoredTeacher


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the file is written, 2 with one line on stderr for what cannot be done."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(read_tables(options.config))
        num_written, left_out = export(settings, options)
    except (ConfigError, SQLAlchemyError) as error:
        print(f"millrace distill: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"millrace distill: {described(error)}", file=sys.stderr)
        return 2
    print(f"{num_written} conversations written to {options.out}", file=sys.stderr)
    for why, number in left_out.most_common():
        print(f"{number} left out: {why}", file=sys.stderr)
    return 0


def export(settings: Settings, options: argparse.Namespace) -> tuple[int, Counter[str]]:
    """Writes the file, whole or not at all; the number of its lines, and of what was left out by reason."""
    tenants = _consenting(settings, options.tenant)
    store = Store.open(settings.gateway.store)
    if store is None:
        raise ConfigError(
            "gateway.store.tenants: nobody's responses are kept; name the tenants whose answers are to teach"
        )
    chosen = Selection(
        models=frozenset(options.model),
        since_unix_s=options.since.timestamp() if options.since else 0.0,
        with_thoughts=options.thoughts,
    )
    teacher = StoredTeacher(store.responses, store.conversations)
    out: Path = options.out
    if out.exists():
        raise ConfigError(f"--out: {out} is there; name another file, or remove it")
    unfinished = out.with_name(f".{out.name}.unfinished")
    num_written, left_out = 0, Counter[str]()
    try:
        # Readable by its owner alone: it has what tenants wrote.
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            for tenant in tenants:
                for found in teacher.examples(tenant, chosen):
                    if isinstance(found, NotWritten):
                        left_out[found.why] += 1
                        continue
                    file.write(json.dumps(found, ensure_ascii=False) + "\n")
                    num_written += 1
        unfinished.rename(out)
    finally:
        unfinished.unlink(missing_ok=True)
        store.dispose()
    return num_written, left_out


def _consenting(settings: Settings, named: Sequence[str]) -> list[str]:
    """The tenants whose answers are written. Raises ConfigError for one who has not consented."""
    consenting = [name for name, tenant in settings.tenants.items() if tenant.training_data]
    for name in named:
        if name not in settings.tenants:
            raise ConfigError(f"--tenant: {name!r} is no tenant; known are {', '.join(settings.tenants)}")
        if name not in consenting:
            raise ConfigError(
                f"--tenant: {name!r} has not consented; when it has, set training_data = true in "
                f"[tenants.{name}]"
            )
    if not consenting:
        raise ConfigError(
            "no tenant has consented that its answers become training data; set training_data = true in "
            "[tenants.<name>] of those who have"
        )
    return list(named) or consenting


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace distill", description=__doc__.partition("\n\n")[2])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    written = commands.add_parser("export", help="write stored answers as JSON lines")
    written.add_argument("--config", type=Path, help="configuration file; the running stack's by default")
    written.add_argument("--out", type=Path, required=True, help="file to write; it must not exist")
    written.add_argument(
        "--model", action="append", default=[], help="teacher; repeat for several, all by default"
    )
    written.add_argument(
        "--tenant", action="append", default=[], help="of those who have consented; all by default"
    )
    written.add_argument("--since", type=_moment, help="no older answers, as 2026-01-31 or with a time (UTC)")
    written.add_argument("--thoughts", action="store_true", help="with what the model thought")
    return parser


if __name__ == "__main__":
    sys.exit(main())
