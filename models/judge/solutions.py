"""Arithmetic of the corpus with the steps of its solutions, which of them are right, and ways to go wrong.

A step is a line. It is right where it and all before it are what the corpus writes for the question: the
bundled model has one way to each sum, so that no other one has to be believed, and one can say at which
character a solution goes wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from models.corpus import CorpusDocument, Draw, arithmetic

DELIMITER = "\n"
"""What ends a step, as it does in a search over steps."""
NUM_HELD_OUT = 2_000
"""Seeds whose questions are for measuring alone, here and in `benchmarks.test_time`."""
# Closed tables: so few that every one is in both splits.
_TABLE = re.compile(r"\d x \d = \d+\.|\d \+ \d = \d+\.|\d+(, \d+)+\.")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class ArithmeticProblem:
    """A question, and the steps of its solution without the delimiters."""

    question: str
    steps: tuple[str, ...]

    @property
    def numbers(self) -> list[int]:
        """Of the question, in its order."""
        return [int(found) for found in _NUMBER.findall(self.question)]

    @property
    def key(self) -> str:
        """What is asked, however it is worded; "" for a row of a table that is learned by heart."""
        if len(self.steps) == 1 and _TABLE.fullmatch(self.steps[0]):
            return ""
        return f"{self.steps[-1]} {sorted(self.numbers)}"


@dataclass(frozen=True)
class GradedSolution:
    """Steps of some solution, each with whether it and all before it are right; and of its text the number of
    characters with which it begins as it should.
    """

    question: str
    steps: tuple[str, ...]
    are_right: tuple[bool, ...]
    num_right_characters: int

    @property
    def text(self) -> str:
        """All of it, without a delimiter at its end."""
        return DELIMITER.join(self.steps)

    @property
    def is_right(self) -> bool:
        """Whether the answer is."""
        return self.are_right[-1]


def problem_of(document: CorpusDocument) -> ArithmeticProblem:
    """The problem that a document of `arithmetic` is."""
    said = document.messages[1]["content"]
    plain = said.replace("<think>\n", "").replace("</think>\n\n", "")
    return ArithmeticProblem(document.messages[0]["content"], tuple(plain.split(DELIMITER)))


def held_out(number: int) -> ArithmeticProblem:
    """One of the questions for measuring: an addition, or other arithmetic, in turn."""
    draw = Draw(number, "eval")
    return problem_of(arithmetic.addition(draw) if number % 2 else arithmetic.other_arithmetic(draw))


@cache
def _held_out_keys() -> frozenset[str]:
    return frozenset(held_out(number).key for number in range(NUM_HELD_OUT)) - {""}


def problems(draw: Draw) -> Iterator[ArithmeticProblem]:
    """Endless ones for training: none of them is asked when the judge is measured, but for closed tables.
    Half of what is no addition is a difference, which the bundled model errs in most.
    """
    while True:
        make = arithmetic.addition if draw.chance(0.4) else arithmetic.other_arithmetic
        problem = problem_of(make(draw))
        is_difference = problem.steps[0].startswith("Ones: ") and " - " in problem.steps[0]
        if make is arithmetic.other_arithmetic and not is_difference and draw.chance(0.75):
            continue
        if problem.key not in _held_out_keys():
            yield problem


def graded(problem: ArithmeticProblem, solution: str) -> GradedSolution:
    """A solution, step by step. One that stops too early has no right last step."""
    text, wanted = solution.rstrip(DELIMITER), DELIMITER.join(problem.steps)
    steps = tuple(text.split(DELIMITER))
    are_right: list[bool] = []
    for place, step in enumerate(steps):
        is_next = place < len(problem.steps) and step == problem.steps[place]
        are_right.append(is_next and (not are_right or are_right[-1]))
    if len(steps) < len(problem.steps):
        are_right[-1] = False
    differs = (place for place, (one, other) in enumerate(zip(text, wanted, strict=False)) if one != other)
    num_right = next(differs, min(len(text), len(wanted)))
    return GradedSolution(problem.question, steps, tuple(are_right), num_right)


def solved(problem: ArithmeticProblem) -> GradedSolution:
    """The solution as the corpus writes it."""
    return graded(problem, DELIMITER.join(problem.steps))


# Ways to go wrong.


def slipped(draw: Draw, problem: ArithmeticProblem) -> GradedSolution:
    """The problem's solution with one slip; what follows goes on from it, or knows nothing of it."""
    while True:
        make = _carried if len(problem.steps) > 1 and draw.chance(0.6) else _misread
        found = graded(problem, DELIMITER.join(make(draw, problem)))
        if not found.is_right:
            return found


def _error(draw: Draw) -> int:
    return draw.pick((-1, 1)) * (1 if draw.chance(0.5) else draw.integer(1, 9))


def _carried(draw: Draw, problem: ArithmeticProblem) -> list[str]:
    """A sum or difference in columns with a slip in one place, from which everything follows."""
    is_sum = " + " in problem.steps[0]
    a, b = problem.numbers if is_sum else sorted(problem.numbers, reverse=True)
    place = draw.integer(0, 4)
    slips = [_error(draw) if each == place else 0 for each in range(3)]
    if place == 3:
        # A digit of a summand is misread.
        a, b = draw.pick(((a + _error(draw), b), (a, b + _error(draw)), (b, a)))
        a, b = min(max(a, 0), 99), min(max(b, 0), 99)
    flips = int(place == 4)
    if is_sum:
        ones = max(0, a % 10 + b % 10 + slips[0])
        carry = (ones // 10) ^ flips
        first = f"Ones: {a % 10} + {b % 10} = {ones}, write {ones % 10}, carry {carry}."
        tens, sign = max(0, a // 10 + b // 10 + carry + slips[1]), "+"
    else:
        carry = int(a % 10 < b % 10) ^ flips
        upper = a % 10 + 10 * carry
        ones = max(0, upper - b % 10 + slips[0])
        first = f"Ones: {upper} - {b % 10} = {ones}, borrow {carry}."
        tens, sign = max(0, a // 10 - b // 10 - carry + slips[1]), "-"
    second = f"Tens: {a // 10} {sign} {b // 10} {sign} {carry} = {tens}."
    answer = max(0, 10 * tens + ones % 10 + slips[2] * draw.pick((1, 10)))
    return [first, second, f"The answer is {answer}."]


def _misread(draw: Draw, problem: ArithmeticProblem) -> list[str]:
    """A solution in which one number is another one, and the rest as it should be."""
    steps = list(problem.steps)
    place = draw.integer(0, len(steps) - 1)
    found = draw.pick(list(_NUMBER.finditer(steps[place])))
    others = [*problem.numbers, *map(int, _NUMBER.findall(steps[place]))]
    value = int(found.group())
    wrong = draw.pick(others) if draw.chance(0.3) else max(0, value + _error(draw) * draw.pick((1, 1, 10)))
    steps[place] = steps[place][: found.start()] + str(wrong) + steps[place][found.end() :]
    if " is larger than " in steps[place] and draw.chance(0.5):
        larger, smaller = problem.steps[place].rstrip(".").split(" is larger than ")
        steps[place] = f"{smaller} is larger than {larger}."
    return steps
