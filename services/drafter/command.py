"""`millrace train-drafter`: the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runtime.errors import ConfigError
from services.cli.options import flattened
from services.cli.verdicts import judging
from services.drafter.options import CourseOptions, DrafterMethod, Threads, TrainedModel, folder_of

_notes = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What is trained for which model."""

    model: TrainedModel
    data: Annotated[
        Path,
        typer.Option(help="JSON lines with messages, and perhaps tools, or with text; answers are learned."),
    ]
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the head; a course is kept there, too.")
    ]
    method: Annotated[DrafterMethod, typer.Option(help="Kind of head.")] = DrafterMethod.EAGLE3
    threads: Threads = 0


@flattened
def train_drafter(options: DrafterOptions, course: CourseOptions) -> None:
    """Train a head that drafts for a model, with the model's own hidden states.

    The folder goes into engine.speculation.draft_model, beside the method; vLLM loads those of eagle3 and
    medusa, too.
    Interrupted, the same command goes on.
    """
    with judging(_notes):
        _train(options, course)


def _check(options: DrafterOptions, course: CourseOptions) -> None:
    """Raises ConfigError for what need not be read before it is refused."""
    if (options.out / "config.json").exists():
        raise ConfigError(f"--out {options.out}: there is a head already; name another folder")
    if course.draft_vocab and options.method is DrafterMethod.MTP:
        raise ConfigError(
            f"--draft-vocab {course.draft_vocab}: with --method {options.method} the model's own head draws, "
            "and all its ids; leave it out, or set --method to eagle3 or medusa"
        )


def _train(options: DrafterOptions, course: CourseOptions) -> None:
    _check(options, course)
    model = folder_of(options.model)
    # It brings torch, which other commands do without.
    import torch

    from services.drafter.course import CourseProgress, train_head
    from services.drafter.lessons import read_lessons
    from services.drafter.target import DraftedModel

    if options.threads:
        torch.set_num_threads(options.threads)
    lessons = read_lessons(options.data, model, course.max_tokens)
    longest = max(len(lesson.ids) for lesson in lessons)
    _notes.print(f"{len(lessons)} lessons of up to {longest} tokens", markup=False)
    target = DraftedModel(
        model,
        num_rows=course.rows,
        max_tokens=longest,
        num_threads=options.threads,
        method=options.method,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *(TextColumn(each) if isinstance(each, str) else each for each in columns), console=_notes
    ) as bar:
        task = bar.add_task("training", total=course.steps)

        def tell(done: CourseProgress) -> None:
            held = " ".join(f"{share:.2f}" for share in done.held)
            bar.update(task, completed=done.step, description=f"loss {done.loss:.3f}, drafts hold {held}")

        train_head(target, lessons, options.out, options.model, course, tell)
    size = (options.out / "model.safetensors").stat().st_size
    Console(highlight=False).print(f"{options.out}: {size / 2**20:.1f} MiB", markup=False, soft_wrap=True)
