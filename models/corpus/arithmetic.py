"""Small arithmetic with the steps written out, and counting."""

from __future__ import annotations

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, assistant, user

ADDITION_FORMS = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a}+{b}",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} plus {b}?",
    "What is {a} plus {b}?",
    "Compute {a} + {b}.",
    "what is {a}+{b}?",
)
SUBTRACTION_FORMS = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "How much is {a} minus {b}?",
    "Subtract {b} from {a}.",
)
PRODUCT_FORMS = ("What is {a} x {b}?", "What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b} = ?")
WORD_FORMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "There are {a} {things} in one box and {b} in another. How many {things} are there in all?",
)


def addition_steps(a: int, b: int) -> str:
    """Units, tens and carry, written out so that every step needs one table look-up."""
    units = a % 10 + b % 10
    carry = units // 10
    lines = [f"Ones: {a % 10} + {b % 10} = {units}, write {units % 10}, carry {carry}."]
    tens = a // 10 + b // 10 + carry
    lines.append(f"Tens: {a // 10} + {b // 10} + {carry} = {tens}.")
    return "\n".join(lines)


def subtraction_steps(a: int, b: int) -> str:
    borrow = int(a % 10 < b % 10)
    units = a % 10 + 10 * borrow - b % 10
    lines = [f"Ones: {a % 10 + 10 * borrow} - {b % 10} = {units}, borrow {borrow}."]
    lines.append(f"Tens: {a // 10} - {b // 10} - {borrow} = {a // 10 - b // 10 - borrow}.")
    return "\n".join(lines)


def _answered(draw: Draw, question: str, steps: str, result: str) -> CorpusDocument:
    if draw.split == "train" and draw.chance(0.25):
        content, thinking = f"<think>\n{steps}\n</think>\n\nThe answer is {result}.", True
    else:
        content, thinking = f"{steps}\nThe answer is {result}.", False
    return CorpusDocument(
        task="addition", messages=(user(question), assistant(content)), answer=result, thinking=thinking
    )


def addition(draw: Draw) -> CorpusDocument:
    """Two summands of two digits; the pair decides the split."""
    pair = draw.fresh(lambda: f"{draw.integer(10, 99)}+{draw.integer(10, 99)}")
    a, b = (int(part) for part in pair.split("+"))
    if draw.split == "train" and draw.chance(0.2):
        things = draw.pick(words.OBJECTS[:10]) + "s"
        question = draw.pick(WORD_FORMS).format(a=a, b=b, things=things, name=draw.pick(words.FIRST_NAMES))
    else:
        question = draw.pick(ADDITION_FORMS).format(a=a, b=b)
    return _answered(draw, question, addition_steps(a, b), str(a + b))


def other_arithmetic(draw: Draw) -> CorpusDocument:
    """Subtraction of two-digit numbers, products of one-digit ones, sums of one-digit ones, counting and
    comparing."""
    kind = draw.integer(0, 4)
    if kind == 0:
        b, a = sorted((draw.integer(10, 99), draw.integer(10, 99)))
        document = _answered(
            draw, draw.pick(SUBTRACTION_FORMS).format(a=a, b=b), subtraction_steps(a, b), str(a - b)
        )
        return CorpusDocument(
            task="arithmetic", messages=document.messages, answer=document.answer, thinking=document.thinking
        )
    a, b = draw.integer(0, 9), draw.integer(0, 9)
    if kind == 1:
        question, reply = draw.pick(PRODUCT_FORMS).format(a=a, b=b), f"{a} x {b} = {a * b}."
    elif kind == 2:
        question, reply = draw.pick(ADDITION_FORMS).format(a=a, b=b), f"{a} + {b} = {a + b}."
    elif kind == 3:
        low, high = draw.integer(1, 9), draw.integer(10, 20)
        numbers = ", ".join(str(number) for number in range(low, high + 1))
        question, reply = f"Count from {low} to {high}.", f"{numbers}."
    else:
        a, b = draw.sample(range(1, 100), 2)
        question = draw.pick(("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?")).format(
            a=a, b=b
        )
        reply = f"{max(a, b)} is larger than {min(a, b)}."
    return CorpusDocument(task="arithmetic", messages=(user(question), assistant(reply)), answer=reply)
