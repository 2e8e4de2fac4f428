"""What the bundled model itself makes of problems: solutions drawn as `test_time` draws them, and graded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from models.evaluate import EvaluatedModel
from models.judge.solutions import ArithmeticProblem, GradedSolution, graded

BASE = Path(__file__).parents[1] / "millrace-nano"
MAX_TOKENS = 64
# Problems that are answered at a time.
_TOGETHER = 64


def drawn(problems: Sequence[ArithmeticProblem], kept: Path, *, each: int, seed: int) -> list[GradedSolution]:
    """`each` solutions of every problem at temperature 1, in the problems' order. Their texts are read from
    the file `kept` where it is there, and else written to it.
    """
    if not kept.exists():
        texts = _texts(problems, each, seed)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text("".join(json.dumps(some) + "\n" for some in texts), encoding="utf-8")
    rows = [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]
    return [graded(problem, text) for problem, some in zip(problems, rows, strict=True) for text in some]


def _texts(problems: Sequence[ArithmeticProblem], each: int, seed: int) -> list[list[str]]:
    torch.manual_seed(seed)
    model, found = EvaluatedModel(BASE), []
    for start in range(0, len(problems), _TOGETHER):
        part = problems[start : start + _TOGETHER]
        prompts = [model.prompt(({"role": "user", "content": problem.question},)) for problem in part]
        drawing = {"do_sample": True, "temperature": 1.0, "top_k": 0, "num_return_sequences": each}
        texts = model.replies(prompts, MAX_TOKENS, **drawing)
        found += [texts[begin : begin + each] for begin in range(0, len(texts), each)]
    return found
