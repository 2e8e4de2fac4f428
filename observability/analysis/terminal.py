"""What the commands on the local store share: its option, where they draw, and one line on failure."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table

from observability.analysis.store import SpanReader, StoreError
from observability.emit.config import ObservabilityConfig

_SIZE_WHEN_PIPED = (140, 40)

Answer = Callable[[SpanReader, argparse.Namespace], RenderableType]


def console_width() -> int:
    """Columns to draw for: the terminal's, COLUMNS, or a page's width when the output is piped."""
    return shutil.get_terminal_size(_SIZE_WHEN_PIPED).columns


def table(*titles: str, num_left: int = 1) -> Table:
    """With columns of texts, and then of numbers."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for index, title in enumerate(titles):
        made.add_column(title, justify="left" if index < num_left else "right", no_wrap=True)
    return made


def run(parser: argparse.ArgumentParser, answer: Answer, arguments: Sequence[str] | None) -> int:
    """Prints what `answer` says of the store: 0, or 1 with one clear line when there is nothing to say."""
    parser.add_argument("--store", type=Path, default=Path(ObservabilityConfig().store))
    parsed = parser.parse_args(arguments)
    try:
        reader = SpanReader(parsed.store)
        try:
            found = answer(reader, parsed)
        finally:
            reader.close()
        Console(width=console_width(), highlight=False).print(found)
    except StoreError as error:
        print(error, file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
