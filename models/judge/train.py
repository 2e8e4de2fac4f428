"""Train the judge of steps: `python -m models.judge.train --out build/judge`.

A fixed number of steps from fixed seeds, on one core in some twenty minutes. Of the lessons a third are
right solutions as the corpus writes them, a third the same with a slip, a third what the bundled model drew.
Process reward models learn from labels of steps, which people (Lightman et al., arXiv 2305.20050) or
roll-outs (Wang et al., arXiv 2312.08935) give. Here the corpus does, which knows at which character a
solution goes wrong: every token has a label, ten times as many as steps. Beside that the judge goes on to
predict what is right, because whoever knows what should stand there sees what is wrong. What the model drew
is kept in --work, and not drawn again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from models.architecture import END_OF_TEXT_ID
from models.corpus import Draw
from models.judge.evaluate import measured, table
from models.judge.network import StepJudge, export_judge, judging_tokenizer
from models.judge.sampling import BASE, drawn
from models.judge.solutions import DELIMITER, GradedSolution, problems, slipped, solved

# Whose layers it begins with.
START = BASE.with_name("millrace-nano-draft")
NUM_STEPS, NUM_ROWS, RATE, SEED = 1_400, 32, 3e-3, 1
NUM_PROBLEMS, SOLUTIONS_EACH = 2_000, 4
# Batches whose lessons are drawn together.
_GROUPED = 8
# Tokens with which steps end, and by how much more they weigh.
_ENDS, _END_WEIGHT = (".", ".\u010a"), 3.0


@dataclass(frozen=True)
class JudgeBatch:
    """ids [B, T]; `selected` [N] flat positions of the solutions' tokens; labels [N], 1 where all is right up
    to there; weights [N].
    """

    ids: Tensor
    selected: Tensor
    labels: Tensor
    weights: Tensor


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
    length = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [END_OF_TEXT_ID] * (length - len(row)) for row, _ in rows])
    labelled = [(row * length + place, label) for row, (_, each) in enumerate(rows) for place, label in each]
    selected = torch.tensor([place for place, _ in labelled])
    ends = torch.tensor([tokenizer.token_to_id(token) for token in _ENDS])
    weights = 1.0 + _END_WEIGHT * torch.isin(ids.flatten()[selected], ends)
    labels = torch.tensor([label for _, label in labelled], dtype=torch.float32)
    return JudgeBatch(ids, selected, labels, weights / weights.sum())


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


def train(judge: StepJudge, tokenizer: Tokenizer, lessons: Iterator[GradedSolution], num_steps: int) -> None:
    """Binary cross-entropy of every token; a line per hundred updates."""
    optimizer = torch.optim.AdamW(judge.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 100, 1.0, (num_steps - step) / (0.6 * num_steps))
    )
    draw, waiting = Draw(SEED + 1), list[list[GradedSolution]]()
    started, shown = time.monotonic(), torch.ones(2)
    judge.train()
    for step in range(num_steps):
        if not waiting:
            # Of like lengths side by side, as counting is long.
            some = sorted(
                islice(lessons, _GROUPED * NUM_ROWS), key=lambda each: len(each.question + each.text)
            )
            waiting = [some[begin : begin + NUM_ROWS] for begin in range(0, len(some), NUM_ROWS)]
            draw.random.shuffle(waiting)
        batch = batch_of(tokenizer, draw, waiting.pop())
        right = batch.selected[batch.labels > 0]
        judged, predicted = judge.judged_and_predicted(batch.ids, batch.selected, right)
        loss = F.binary_cross_entropy_with_logits(judged, batch.labels, batch.weights, reduction="sum")
        guess = F.cross_entropy(predicted, batch.ids.flatten()[right])
        (loss + guess).backward()
        torch.nn.utils.clip_grad_norm_(judge.parameters(), 1.0)
        optimizer.step()  # type: ignore[no-untyped-call]
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        shown = 0.95 * shown + 0.05 * torch.stack((loss, guess)).detach()
        if step % 100 == 99:
            of_labels, of_tokens = shown.tolist()
            took = f"{time.monotonic() - started:.0f} s"
            print(f"step {step + 1} loss {of_labels:.4f}, of tokens {of_tokens:.4f} {took}", flush=True)
    judge.eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the judge")
    parser.add_argument("--work", type=Path, default=Path("build/judge-work"), help="what the model drew")
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    asked = list(islice(problems(Draw(SEED)), NUM_PROBLEMS))
    solutions = drawn(asked, arguments.work / "solutions.jsonl", each=SOLUTIONS_EACH, seed=SEED)
    share = sum(each.is_right for each in solutions) / len(solutions)
    print(f"{len(solutions)} solutions drawn, {100 * share:.1f} % right", flush=True)
    torch.manual_seed(SEED)
    judge, tokenizer = StepJudge(), judging_tokenizer(BASE)
    judge.begin_from(START)
    train(judge, tokenizer, lessons_of(Draw(SEED + 2), solutions), arguments.steps)
    export_judge(judge, tokenizer, arguments.out)
    print(table(measured(arguments.out, arguments.work)))


if __name__ == "__main__":
    main()
