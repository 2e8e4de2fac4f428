"""The course that trains a head: batches, loss, and what is kept so that the same command goes on.

Shape letters: R rows whose distributions are learned, V ids that the head draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from runtime.errors import ConfigError
from services.drafter.head import TrainedHead, eagle_head, kept_ids, write_head
from services.drafter.lessons import Lesson, batches, digest
from services.drafter.medusa import TrainedMedusa
from services.drafter.mtp import TrainedPredictor
from services.drafter.options import CourseOptions, DrafterMethod
from services.drafter.target import DraftedModel

STATE = "training.pt"
# Later drafts count less: they come into play where the earlier ones hold.
_DISCOUNT = 0.8
_WARM_UP_STEPS, _LARGEST_GRADIENT = 50, 1.0
_SAVE_EVERY_S = 60.0
# How fast the running figures fade.
_FADING = 0.98
# A head for a target, by the target's name, the ids that it draws, and how many drafts it learns.
_MAKERS: dict[DrafterMethod, Callable[[DraftedModel, str, Tensor, int], TrainedHead]] = {
    DrafterMethod.EAGLE3: eagle_head,
    DrafterMethod.MEDUSA: TrainedMedusa,
    DrafterMethod.MTP: TrainedPredictor,
}


@dataclass(frozen=True, kw_only=True)
class CourseProgress:
    """Steps done, loss of late, and the share of first, second … drafts that held where those before did."""

    step: int
    loss: float
    held: tuple[float, ...]


def train_head(
    target: DraftedModel,
    lessons: Sequence[Lesson],
    out: Path,
    model: str,
    options: CourseOptions,
    tell: Callable[[CourseProgress], None],
) -> TrainedHead:
    """Trains a head of the target's method and writes its files to `out`. Interrupted, the same call goes on
    after the last state that was kept there. Raises ConfigError for a state of another course.
    """
    torch.manual_seed(options.seed)
    answers = [lesson.ids[lesson.num_given :] for lesson in lessons]
    kept = kept_ids(answers, target.spec.vocab_size, options.draft_vocab)
    head = _MAKERS[target.method](target, model, kept, options.rounds)
    identity = msgspec.json.encode((head.config(), options)).decode()
    course = _Course(head, options, out, f"{digest(lessons)} {identity}")
    course.go_on()
    saved_s = time.monotonic()
    for batch in batches(lessons, options.rows, course.step):
        if course.step >= options.steps:
            break
        tell(course.learn(batch, target))
        if time.monotonic() - saved_s > _SAVE_EVERY_S:
            course.save()
            saved_s = time.monotonic()
    write_head(head, out)
    (out / STATE).unlink(missing_ok=True)
    return head


class _Course:
    """A head in training."""

    def __init__(self, head: TrainedHead, options: CourseOptions, out: Path, identity: str) -> None:
        self.head, self.options, self.out, self.identity = head, options, out, identity
        self.step, self.loss = 0, 0.0
        self.held = [0.0] * options.rounds
        self.optimizer = torch.optim.AdamW(
            head.parameters(), lr=options.rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    def go_on(self) -> None:
        """Takes up what was kept."""
        path = self.out / STATE
        if not path.exists():
            return
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state["identity"] != self.identity:
            raise ConfigError(
                f"{path} is of a course with other lessons, another model or other options; finish that one "
                "with its own command, or name another --out"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.loss, self.held = state["step"], state["loss"], state["held"]

    def save(self) -> None:
        """Keeps the state, replaced in one piece."""
        unfinished = self.out / f"{STATE}.new"
        state: dict[str, Any] = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"identity": self.identity, "step": self.step, "loss": self.loss, "held": self.held}
        torch.save(state, unfinished)
        unfinished.replace(self.out / STATE)

    def learn(self, batch: Sequence[Lesson], target: DraftedModel) -> CourseProgress:
        """One step."""
        for group in self.optimizer.param_groups:
            warm = min((self.step + 1) / _WARM_UP_STEPS, 1.0)
            group["lr"] = self.options.rate * warm * (1 - self.step / self.options.steps)
        loss, held = self._loss(batch, target)
        loss.backward()  # type: ignore[no-untyped-call]
        loss = loss.detach()
        nn.utils.clip_grad_norm_(self.head.parameters(), _LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        new = 1.0 if not self.step else 1 - _FADING
        self.loss += new * (float(loss) - self.loss)
        self.held = [was + new * (now - was) for was, now in zip(self.held, held, strict=True)]
        self.step += 1
        return CourseProgress(step=self.step, loss=self.loss, held=tuple(self.held))

    def _loss(self, batch: Sequence[Lesson], target: DraftedModel) -> tuple[Tensor, list[float]]:
        """Divergence from the target's distributions over the answers' tokens; and the share of rows of each
        round whose likeliest token is the target's.
        """
        # (lesson, token) behind which an answer's tokens are drawn; the head is asked from the second one on.
        rows = [
            (number, place)
            for number, lesson in enumerate(batch)
            for place in range(max(1, lesson.num_given - 1), len(lesson.ids) - 1)
        ]
        whose, places = torch.tensor(rows).T
        lengths = [len(lesson.ids) for lesson in batch]
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        states, logits = target.read([lesson.ids for lesson in batch], starts[whose.numpy()] + places.numpy())
        ids = nn.utils.rnn.pad_sequence([torch.tensor(lesson.ids) for lesson in batch], batch_first=True)
        parts = nn.utils.rnn.pad_sequence(list(torch.split(states, lengths)), batch_first=True)
        best = logits.argmax(-1)
        drawn = torch.isin(best, self.head.kept_ids)
        wanted = logits[:, self.head.kept_ids].softmax(-1)
        total, held = torch.zeros(()), []
        for number, hidden in enumerate(self.head.rounds(parts, ids, self.options.rounds)):
            # What follows token p was foreseen at p - 1 - number.
            there = drawn & (places >= 1 + number)
            said = self.head.logits(hidden[whose[there], places[there] - 1 - number], number)
            each = nn.functional.kl_div(said.log_softmax(-1), wanted[there], reduction="batchmean")
            total = total + _DISCOUNT**number * each
            right = self.head.kept_ids[said.argmax(-1)] == best[there]
            held.append(float(right.sum()) / max(1, int((places >= 1 + number).sum())))
        return total, held
