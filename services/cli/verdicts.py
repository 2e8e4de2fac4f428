"""How a command ends whose status is a verdict: 1 says "worse", so nothing else may end with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from runtime.errors import ConfigError, described


@contextmanager
def judging(notes: Console, interrupted: str = "interrupted; the same command goes on") -> Iterator[None]:
    """Ends the command with 2 and a line on `notes` for bad input, with 130 where it was interrupted, and
    with 2 for any unforeseen error, for which Python's own status would be 1.
    """
    try:
        yield
    except (ConfigError, OSError) as error:
        told = described(error) if isinstance(error, OSError) else str(error)
        notes.print(f"millrace: {told}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        notes.print(interrupted, markup=False)
        raise typer.Exit(130) from None
    except Exception as error:
        notes.print_exception()
        raise typer.Exit(2) from error
