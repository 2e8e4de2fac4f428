"""Measure the judge of steps: `python -m models.judge.evaluate [models/millrace-nano-judge]`.

The bundled model draws eight solutions at temperature 1 for each of 500 questions, none of which was trained
on but for the closed tables. The area under the curve is the chance that of a right and a wrong one the right
one has the higher score, ties being halves: over all pairs, and over pairs of one question, which is what a
choice among samples is made of. Scores are computed by torch in float32; what is drawn is kept in --work.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from models.judge.network import judging_tokenizer, open_judge, scores
from models.judge.sampling import BASE, drawn
from models.judge.solutions import DELIMITER, NUM_HELD_OUT, GradedSolution, held_out

JUDGE = BASE.with_name("millrace-nano-judge")
NUM_QUESTIONS, SOLUTIONS_EACH, SEED = 500, 8, 7
_STEPS = ("a first step", "a second step", "a last step, and all before it")


@dataclass(frozen=True)
class JudgeMeasure:
    """A row of the table."""

    what: str
    num_right: int
    num_wrong: int
    area: float
    area_of_one_question: float


def area(right: Sequence[float], wrong: Sequence[float]) -> float:
    """Under the curve of true against false positives: by ranks, ties being halves (Mann and Whitney)."""
    if not right or not wrong:
        return 0.5
    ours, theirs = torch.tensor(right), torch.tensor(wrong).sort().values
    below = torch.searchsorted(theirs, ours).sum() + torch.searchsorted(theirs, ours, right=True).sum()
    return float(below) / (2 * len(right) * len(wrong))


def area_within(groups: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The same over pairs of the same group alone, each of which weighs by its pairs."""
    weighed = [(area(right, wrong), len(right) * len(wrong)) for right, wrong in groups]
    total = sum(weight for _, weight in weighed)
    return sum(value * weight for value, weight in weighed) / total if total else 0.5


def held_out_solutions(work: Path) -> list[GradedSolution]:
    """What the bundled model draws for questions that are for measuring: the last ones, as benchmarks ask
    the first.
    """
    asked = [held_out(number) for number in range(NUM_HELD_OUT - NUM_QUESTIONS, NUM_HELD_OUT)]
    return drawn(asked, work / "held-out.jsonl", each=SOLUTIONS_EACH, seed=SEED)


def measured(folder: Path, work: Path) -> list[JudgeMeasure]:
    """Rows for steps by their place, and for answers."""
    judge, tokenizer = open_judge(folder), judging_tokenizer(BASE)
    solutions = held_out_solutions(work)
    found = []
    for place, what in enumerate(_STEPS):
        is_last = place == len(_STEPS) - 1
        chosen = [each for each in solutions if is_last or len(each.steps) > place + 1]
        ends = [len(each.steps) if is_last else place + 1 for each in chosen]
        pairs = [
            (each.question, DELIMITER.join(each.steps[:end]) + DELIMITER * (not is_last))
            for each, end in zip(chosen, ends, strict=True)
        ]
        given = scores(judge, tokenizer, pairs)
        by_question: dict[str, tuple[list[float], list[float]]] = {}
        for each, end, score in zip(chosen, ends, given, strict=True):
            is_wrong = not each.are_right[end - 1]
            by_question.setdefault(each.question, ([], []))[is_wrong].append(score)
        right = [score for each, _ in by_question.values() for score in each]
        wrong = [score for _, each in by_question.values() for score in each]
        within = area_within(by_question.values())
        found.append(JudgeMeasure(what, len(right), len(wrong), area(right, wrong), within))
    return found


def table(rows: Sequence[JudgeMeasure]) -> str:
    """As Markdown."""
    lines = ["| of the solutions | right | wrong | AUC | AUC within a question |", "|---|---|---|---|---|"]
    for row in rows:
        areas = f"{row.area:.4f} | {row.area_of_one_question:.4f}"
        lines.append(f"| {row.what} | {row.num_right} | {row.num_wrong} | {areas} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("judge", type=Path, nargs="?", default=JUDGE)
    parser.add_argument("--work", type=Path, default=Path("build/judge-work"), help="what the model drew")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(table(measured(arguments.judge, arguments.work)))


if __name__ == "__main__":
    main()
