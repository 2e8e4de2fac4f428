"""Train a model within a budget of minutes: `python -m models.train nano --minutes 60 --run build/nano`.

The budget, not a step count, drives the curriculum and the learning rate: warm up, hold, then decay
linearly to zero. So the
same command gives a finished model on a slow machine, only a weaker one. A run continues from its own
folder when it is started
again with the same command.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.architecture import SHAPES, LanguageModel
from models.batches import TrainingBatch, batches
from models.checkpoint import export, import_weights
from models.corpus import Mixture, documents
from models.optimizer import Optimizers
from models.tokenizer import load_tokenizer, save_tokenizer

BUNDLED = Path(__file__).parent / "millrace-nano"
"""Its tokenizer serves every model, so that a draft can propose tokens to any of them."""
SAVE_EVERY_S = 240.0
NUM_ROWS = {256: 12, 512: 4, 1024: 2, 2048: 1}
"""Rows per micro-batch at each sequence length: 2,000 to 3,000 tokens keep activations in the cache."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of the curriculum that lasts until `until` (a fraction of the budget)."""

    until: float
    lengths: dict[int, float]
    recall_share: float
    tokens_per_step: int


NANO_STAGES = (
    Stage(until=0.20, lengths={256: 1.0}, recall_share=0.6, tokens_per_step=6_144),
    Stage(until=0.45, lengths={512: 1.0}, recall_share=0.5, tokens_per_step=8_192),
    Stage(until=0.61, lengths={512: 0.5, 1024: 0.5}, recall_share=0.5, tokens_per_step=8_192),
    Stage(
        until=1.01,
        lengths={256: 0.3, 512: 0.25, 1024: 0.15, 2048: 0.3},
        recall_share=0.4,
        tokens_per_step=4_096,
    ),
)
DRAFT_STAGES = (
    Stage(until=0.50, lengths={256: 1.0}, recall_share=0.5, tokens_per_step=6_144),
    Stage(until=1.01, lengths={512: 0.7, 1024: 0.3}, recall_share=0.4, tokens_per_step=8_192),
)
"""Shorter rows: a draft only has to guess the easy tokens, and is trained for minutes."""
CURRICULA = {"nano": NANO_STAGES, "draft": DRAFT_STAGES}


@dataclass
class TrainingProgress:
    """What a run has done so far; saved with it."""

    elapsed_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


@dataclass
class Run:
    """A model in training: its data, its optimizers and its folder."""

    model: LanguageModel
    tokenizer: Tokenizer
    folder: Path
    budget_s: float
    stages: tuple[Stage, ...]
    teacher: LanguageModel | None = None
    progress: TrainingProgress = field(default_factory=TrainingProgress)

    def __post_init__(self) -> None:
        self.optimizers = Optimizers(self.model)
        self.streams: dict[Mixture, Iterator[TrainingBatch]] = {}
        if self.state_path.exists():
            state = torch.load(self.state_path)
            self.model.load_state_dict(state["model"])
            self.optimizers.load_state_dict(state["optimizers"])
            self.progress = TrainingProgress(**state["progress"])

    @property
    def state_path(self) -> Path:
        return self.folder / "state.pt"

    @property
    def fraction(self) -> float:
        return self.progress.elapsed_s / self.budget_s

    def save(self) -> None:
        """State and export, each replaced in one piece."""
        state = {
            "model": self.model.state_dict(),
            "optimizers": self.optimizers.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, self.state_path.with_suffix(".new"))
        self.state_path.with_suffix(".new").replace(self.state_path)
        export(self.model, self.folder)

    def next_batch(self, stage: Stage) -> TrainingBatch:
        """The next batch of one of the stage's lengths."""
        (length,) = random.choices(list(stage.lengths), list(stage.lengths.values()))
        mixture = Mixture(sequence_length=length, recall_share=stage.recall_share)
        if mixture not in self.streams:
            seed = random.randrange(2**31)
            source = documents(mixture, seed)
            self.streams[mixture] = batches(self.tokenizer, source, length, NUM_ROWS[length])
        return next(self.streams[mixture])

    def loss(self, batch: TrainingBatch) -> Tensor:
        """Weighted sum over trained positions: cross-entropy, or the divergence from the teacher when
        there is one."""
        logits = self.model.logits(batch.ids, batch.selected)
        if self.teacher is None:
            each = F.cross_entropy(logits, batch.targets, reduction="none")
        else:
            with torch.no_grad():
                wanted = self.teacher.logits(batch.ids, batch.selected).softmax(-1)
            each = F.cross_entropy(logits, wanted, reduction="none")
        return (each * batch.weights).sum()

    def step(self, stage: Stage) -> float:
        """One update; returns the mean loss per weighted token."""
        total, weight, num_tokens = 0.0, 0.0, 0
        while num_tokens < stage.tokens_per_step:
            batch = self.next_batch(stage)
            loss = self.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total, weight = total + loss.item(), weight + batch.weights.sum().item()
            num_tokens += batch.ids.numel()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight)
        self.optimizers.step(rate_at(self.progress.num_steps, self.fraction))
        self.progress.num_steps += 1
        self.progress.num_tokens += num_tokens
        return total / weight


def rate_at(num_steps: int, fraction: float) -> float:
    """Learning-rate factor in [0, 1]: 50 steps of warm-up, a plateau, linear decay over the last third."""
    return min((num_steps + 1) / 50, 1.0, max(0.0, (1.0 - fraction) / 0.35))


def train(run: Run) -> None:
    """Until the budget is spent; a line per 20 steps, a checkpoint every few minutes."""
    saved_at, smooth = time.monotonic(), 0.0
    while run.fraction < 1.0:
        started = time.monotonic()
        stage = next(stage for stage in run.stages if run.fraction < stage.until)
        loss = run.step(stage)
        run.progress.elapsed_s += time.monotonic() - started
        smooth = loss if smooth == 0.0 else 0.95 * smooth + 0.05 * loss
        if run.progress.num_steps % 20 == 0:
            done = run.progress
            rate = done.num_tokens / done.elapsed_s
            print(
                f"step {done.num_steps} {run.fraction:.3f} loss {smooth:.4f} "
                f"tokens {done.num_tokens} {rate:.0f}/s",
                flush=True,
            )
        if time.monotonic() - saved_at > SAVE_EVERY_S:
            run.save()
            saved_at = time.monotonic()
    run.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--minutes", type=float, required=True, help="budget of training time")
    parser.add_argument(
        "--run", type=Path, required=True, help="folder of this run: state and exported model"
    )
    parser.add_argument("--teacher", type=Path, help="exported nano model to distil from")
    arguments = parser.parse_args()
    folder: Path = arguments.run
    tokenizer = load_tokenizer(BUNDLED)
    save_tokenizer(tokenizer, folder)
    model = LanguageModel(SHAPES[arguments.shape])
    teacher = None
    if arguments.teacher:
        teacher = LanguageModel(SHAPES["nano"]).requires_grad_(False)
        import_weights(teacher, arguments.teacher)
        teacher.compile_layers()
    run = Run(model, tokenizer, folder, arguments.minutes * 60, CURRICULA[arguments.shape], teacher)
    model.compile_layers()
    train(run)


if __name__ == "__main__":
    main()
