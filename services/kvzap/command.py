"""`millrace train-kvzap`: the command line."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from runtime.errors import ConfigError
from services.cli.options import flattened
from services.cli.verdicts import judging
from services.drafter.options import Threads, TrainedModel, folder_of

_notes = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class ScorerOptions:
    """What is trained for which model."""

    model: TrainedModel
    data: Annotated[
        Path,
        typer.Option(help="JSON lines with text, or with messages: what prompts will be like."),
    ]
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of the scorer.")]
    max_tokens: Annotated[int, typer.Option(min=16, max=65_536, help="Longer lines are left out.")] = 1024
    threads: Threads = 0


@flattened
def train_kvzap(options: ScorerOptions) -> None:
    """Train a scorer, by which answers choose what they keep of their prompts.

    The folder goes into engine.cache.kvzap; then requests may ask for kv.policy kvzap. kvpress loads it, too.
    A line takes one forward of twice its tokens; nothing is kept of a run that was interrupted.
    """
    with judging(_notes, "interrupted; nothing is kept, and the same command begins anew"):
        _train(options)


def _train(options: ScorerOptions) -> None:
    if (options.out / "config.json").exists():
        raise ConfigError(f"--out {options.out}: there is a model already; name another folder")
    options.out.mkdir(parents=True, exist_ok=True)
    if not os.access(options.out, os.W_OK):
        raise ConfigError(f"--out {options.out}: nothing can be written there; name another folder")
    model = folder_of(options.model)
    # They bring torch, which other commands do without.
    from services.drafter.lessons import read_lessons
    from services.kvzap.fit import HELD_OUT, fit, write
    from services.kvzap.targets import RepeatingModel

    lessons = read_lessons(options.data, model, options.max_tokens)
    if len(lessons) < HELD_OUT:
        fit_in = f"{len(lessons)} of its lines have up to {options.max_tokens} tokens"
        raise ConfigError(f"--data {options.data}: {fit_in}; give {HELD_OUT} or more, or raise --max-tokens")
    longest = max(len(lesson.ids) for lesson in lessons)
    _notes.print(f"{len(lessons)} texts of up to {longest} tokens", markup=False)
    repeating = RepeatingModel(model, max_tokens=longest, num_threads=options.threads)
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress("reading", *columns, console=_notes) as bar:
        task = bar.add_task("reading", total=len(lessons))
        scorer, explained = fit(repeating, lessons, lambda done: bar.update(task, completed=done))
    write(scorer, repeating, options.out)
    Console(highlight=False).print(
        f"{options.out}: it explains {explained:.2f} of what varies in texts that it has not learned from",
        markup=False,
        soft_wrap=True,
    )
