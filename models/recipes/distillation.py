"""Distillation: a smaller model learns from a larger one, from its probabilities or from its answers.

    python -m models.recipes.distillation STUDENT OUT --data answers.jsonl --teacher FOLDER
    millrace distill export --model large --out answers.jsonl
    python -m models.recipes.distillation STUDENT OUT --data answers.jsonl

With a teacher, both read each conversation, and the student's next-token distribution is drawn to the
teacher's (arXiv 1503.02531): they must share a vocabulary. Without one the answers of the file are what
is learned: those that `millrace distill export` writes are a served teacher's. `--layers` makes the
student first: the model's own decoder with the middle layers left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.recipes.fine_tune import (
    IGNORED,
    Course,
    LessonBatch,
    Loss,
    answer_loss,
    course_of,
    fine_tune,
    open_model,
    options,
    save_model,
)


def shortened(model: Any, num_layers: int) -> None:
    """Leaves out the middle layers: the first and last ones keep their neighbours of embedding and head."""
    layers = model.model.layers
    if not 2 <= num_layers <= len(layers):
        raise ValueError(f"--layers: the model has {len(layers)}; keep 2 to {len(layers)} of them")
    first = (num_layers + 1) // 2
    kept = [*range(first), *range(len(layers) - (num_layers - first), len(layers))]
    model.model.layers = nn.ModuleList(layers[index] for index in kept)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = num_layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in kept]


def taught_by(folder: Path, temperature: float, vocabulary: int) -> Loss:
    """Divergence from the teacher's distributions over the answers' tokens, softened by a temperature."""
    teacher, _ = open_model(folder)
    teacher.eval().requires_grad_(False)
    if teacher.config.vocab_size != vocabulary:
        raise ValueError(
            f"--teacher: its vocabulary has {teacher.config.vocab_size} tokens, the student's {vocabulary}; "
            "distributions cannot be compared: learn from its answers instead (millrace distill export)"
        )

    def loss(student: nn.Module, batch: LessonBatch) -> Tensor:
        learned = batch.targets[:, 1:] != IGNORED
        with torch.no_grad():
            wanted = teacher(batch.ids).logits[:, :-1][learned].float() / temperature
        said = student(batch.ids).logits[:, :-1][learned].float() / temperature
        divergence = F.kl_div(
            said.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean"
        )
        return divergence * temperature**2

    return loss


@dataclass(frozen=True, kw_only=True)
class Teaching:
    """Who teaches what student: no teacher is the file's answers, no layers the whole model."""

    teacher: Path | None = None
    temperature: float = 2.0
    layers: int | None = None


def train(folder: Path, out: Path, course: Course, teaching: Teaching) -> None:
    """Teaches the model of a folder, and writes it to another."""
    student, tokenizer = open_model(folder)
    if teaching.layers is not None:
        shortened(student, teaching.layers)
    loss: Loss = answer_loss
    if teaching.teacher is not None:
        loss = taught_by(teaching.teacher, teaching.temperature, student.config.vocab_size)
    fine_tune(student, tokenizer, course, loss)
    save_model(student, folder, out)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--teacher", type=Path, help="folder of a model with the same vocabulary")
    parser.add_argument(
        "--temperature", type=float, default=Teaching.temperature, help="softens both distributions"
    )
    parser.add_argument("--layers", type=int, help="make a student of so many of the model's layers")
    given = parser.parse_args()
    teaching = Teaching(teacher=given.teacher, temperature=given.temperature, layers=given.layers)
    train(given.model, given.out, course_of(given), teaching)


if __name__ == "__main__":
    main()
