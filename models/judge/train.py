"""Train the judge of steps: `python -m models.judge.train --out build/judge`.

A fixed number of steps from fixed seeds, on one core in some forty minutes. Of the lessons a third are
right solutions as the corpus writes them, a third the same with a slip, a third what the bundled model drew.
Process reward models learn from labels of steps, which people (Lightman et al., arXiv 2305.20050) or
roll-outs (Wang et al., arXiv 2312.08935) give. Here the corpus does, which knows at which character a
solution goes wrong: every token has a label, ten times as many as steps. Whoever knows what should stand
there sees what is wrong, so the first layers learn to predict what is right, and then those on top to judge:
the one that compares by the tokens up to the first wrong one, the last one by all. What the model drew is
kept in --work, and not drawn again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.corpus import Draw
from models.judge.evaluate import measured, table
from models.judge.network import StepJudge, export_judge, judging_tokenizer, padded
from models.judge.sampling import BASE, drawn
from models.judge.solutions import DELIMITER, GradedSolution, problems, slipped, solved

# Whose layers it begins with.
START = BASE.with_name("millrace-nano-draft")
NUM_PREDICTING, NUM_JUDGING, NUM_ROWS, RATE, SEED = 4_000, 6_000, 32, 3e-3, 1
NUM_PROBLEMS, SOLUTIONS_EACH = 2_000, 4
# Batches whose lessons are drawn together.
_GROUPED = 8
# Tokens with which steps end, and by how much more they weigh.
_ENDS, _END_WEIGHT = (".", ".\u010a"), 3.0
# Of the first wrong token beside a right one.
_FIRST_WEIGHT = 20.0


@dataclass(frozen=True)
class JudgeBatch:
    """ids [B, T]; `selected` [N] flat positions of the solutions' tokens; labels [N], 1 where all is right up
    to there; weights [N]; and weights [N] where all is right before, which are 0 elsewhere.
    """

    ids: Tensor
    selected: Tensor
    labels: Tensor
    weights: Tensor
    first_weights: Tensor


def _row(
    tokenizer: Tokenizer, draw: Draw, lesson: GradedSolution
) -> tuple[list[int], list[tuple[int, bool]]]:
    """Ids of a lesson, and the places of its solution's tokens with their labels. Some stop at the end of a
    step, with or without a delimiter.
    """
    number = len(lesson.steps) if draw.chance(0.6) else draw.integer(1, len(lesson.steps))
    ends_open = number < len(lesson.steps) and draw.chance(0.6)
    text = DELIMITER.join(lesson.steps[:number]) + DELIMITER * ends_open
    found = tokenizer.encode(lesson.question, text)
    places = [place for place, sequence in enumerate(found.sequence_ids) if sequence == 1]
    return found.ids, [(place, found.offsets[place][1] <= lesson.num_right_characters) for place in places]


def batch_of(tokenizer: Tokenizer, draw: Draw, lessons: Sequence[GradedSolution]) -> JudgeBatch:
    """Lessons side by side. The ends of steps, which are what is asked for, weigh more than other tokens."""
    rows = [_row(tokenizer, draw, lesson) for lesson in lessons]
    ids = padded([row for row, _ in rows])
    length = ids.shape[1]
    labelled = [(row * length + place, label) for row, (_, each) in enumerate(rows) for place, label in each]
    selected = torch.tensor([place for place, _ in labelled])
    ends = torch.tensor([tokenizer.token_to_id(token) for token in _ENDS])
    weights = 1.0 + _END_WEIGHT * torch.isin(ids.flatten()[selected], ends)
    labels = torch.tensor([label for _, label in labelled], dtype=torch.float32)
    are_first = torch.tensor(
        [place == 0 or each[place - 1][1] for _, each in rows for place in range(len(each))]
    )
    first_weights = are_first * torch.where(labels > 0, 1.0, _FIRST_WEIGHT)
    return JudgeBatch(ids, selected, labels, weights / weights.sum(), first_weights / first_weights.sum())


def lessons_of(draw: Draw, solutions: Sequence[GradedSolution]) -> Iterator[GradedSolution]:
    """Endless ones, in equal parts: right, with a slip, and what the bundled model drew, of which half are
    wrong.
    """
    source = problems(draw)
    right = [each for each in solutions if each.is_right]
    wrong = [each for each in solutions if not each.is_right]

    while True:
        yield solved(next(source))
        yield slipped(draw, next(source))
        yield draw.pick(wrong if draw.chance(0.5) else right)


def guess_loss(judge: StepJudge, batch: JudgeBatch) -> Tensor:
    """Cross-entropy of the tokens that are right."""
    right = batch.selected[batch.labels > 0]
    return F.cross_entropy(judge.predicted(batch.ids, right), batch.ids.flatten()[right])


def label_loss(judge: StepJudge, batch: JudgeBatch) -> Tensor:
    """Binary cross-entropy of the labels, by the last layer and by the one that compares."""
    last, inner = judge.judged(batch.ids, batch.selected)
    loss = F.binary_cross_entropy_with_logits
    of_all = loss(last, batch.labels, batch.weights, reduction="sum")
    return of_all + loss(inner, batch.labels, batch.first_weights, reduction="sum")


def train(
    judge: StepJudge,
    batches: Iterator[JudgeBatch],
    loss_of: Callable[[StepJudge, JudgeBatch], Tensor],
    num_steps: int,
) -> None:
    """AdamW over what learns, with warm-up and linear decay; a line per hundred updates."""
    trained = [each for each in judge.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0, (num_steps - step) / (0.6 * max(1, num_steps)))
    )
    started, shown = time.monotonic(), 1.0
    judge.train()
    for step, batch in enumerate(islice(batches, num_steps), 1):
        loss = loss_of(judge, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()  # type: ignore[no-untyped-call]
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        shown = 0.95 * shown + 0.05 * loss.item()
        if step % 100 == 0:
            took = time.monotonic() - started
            print(f"{loss_of.__name__} {shown:.4f} at step {step}, {took:.0f} s", flush=True)
    judge.eval()


def batches_of(tokenizer: Tokenizer, draw: Draw, lessons: Iterator[GradedSolution]) -> Iterator[JudgeBatch]:
    """Endless; of like lengths side by side, as counting is long."""
    while True:
        some = sorted(islice(lessons, _GROUPED * NUM_ROWS), key=lambda each: len(each.question + each.text))
        groups = [some[begin : begin + NUM_ROWS] for begin in range(0, len(some), NUM_ROWS)]
        draw.random.shuffle(groups)
        yield from (batch_of(tokenizer, draw, group) for group in groups)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the judge")
    parser.add_argument("--work", type=Path, default=Path("build/judge-work"), help="what the model drew")
    parser.add_argument("--predicting", type=int, default=NUM_PREDICTING, help="steps that learn to predict")
    parser.add_argument("--judging", type=int, default=NUM_JUDGING, help="steps that learn to judge")
    parser.add_argument("--start", type=Path, default=START, help="folder whose layers it begins with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = list(islice(problems(Draw(SEED)), NUM_PROBLEMS))
    solutions = drawn(asked, arguments.work / "solutions.jsonl", each=SOLUTIONS_EACH, seed=SEED)
    share = sum(each.is_right for each in solutions) / len(solutions)
    print(f"{len(solutions)} solutions drawn, {100 * share:.1f} % right", flush=True)
    torch.manual_seed(SEED)
    judge, tokenizer = StepJudge(), judging_tokenizer(BASE)
    judge.begin_from(arguments.start)
    batches = batches_of(tokenizer, Draw(SEED + 1), lessons_of(Draw(SEED + 2), solutions))
    train(judge, batches, guess_loss, arguments.predicting)
    judge.keep_predicting()
    train(judge, batches, label_loss, arguments.judging)
    export_judge(judge, tokenizer, arguments.out)
    print(table(measured(arguments.out, arguments.work)))


if __name__ == "__main__":
    main()
