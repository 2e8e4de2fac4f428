"""How a head is trained: options of the command line, and all that the course knows of them; and those that
commands have which train anything for a model. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from checkpoint.files import find
from checkpoint.known import known_models
from services.supervisor import checkpoint
from services.supervisor.config import BUNDLED_MODEL

_BUNDLED = "bundled"
TrainedModel: TypeAlias = Annotated[
    str,
    typer.Argument(
        help=f"Folder in Hugging Face format, hub id, or known name ({_BUNDLED}, "
        f"{', '.join(known_models())})."
    ),
]
Threads: TypeAlias = Annotated[
    int, typer.Option(min=0, max=1024, help="Threads that compute; 0 is as many as cores.")
]


def folder_of(model: str) -> Path:
    """The folder of a TrainedModel, fetched where it is not there."""
    return find(str(checkpoint.resolve(str(BUNDLED_MODEL) if model == _BUNDLED else model)))


class DrafterMethod(StrEnum):
    """What is trained."""

    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MTP = "mtp"


@dataclass(frozen=True, kw_only=True)
class CourseOptions:
    """How long, and how. A course that goes on has the same ones."""

    steps: Annotated[int, typer.Option(min=1, help="Batches to learn from.")] = 2000
    rate: Annotated[float, typer.Option(min=1e-8, max=1.0, help="Learning rate.")] = 1e-3
    rows: Annotated[int, typer.Option(min=1, max=1024, help="Lines of a batch.")] = 8
    rounds: Annotated[
        int, typer.Option(min=1, max=16, help="Drafts one after another that are learned; heads of Medusa.")
    ] = 4
    max_tokens: Annotated[int, typer.Option(min=3, max=131_072, help="Longer lines are left out.")] = 512
    draft_vocab: Annotated[
        int,
        typer.Option(min=0, help="Draw only so many ids, the answers' most frequent; 0 (and mtp) draws all."),
    ] = 0
    seed: Annotated[int, typer.Option(min=0, help="Of the head's first weights.")] = 0
