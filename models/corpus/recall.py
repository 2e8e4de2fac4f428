"""Key-value recall: records, dictionaries and notes hidden in prose, then questions about some of them."""

from __future__ import annotations

from collections.abc import Callable

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, Message, assistant, user
from models.corpus.stories import story

RECORD_FORMS = (
    "The {attribute} of {key} is {value}.",
    "{key}: {value}",
    "- {key} = {value}",
    "Note: the {attribute} of {key} is {value}.",
    "{key} has the {attribute} {value}.",
    '"{key}": "{value}"',
)
QUESTION_FORMS = (
    "What is the {attribute} of {key}?",
    "Tell me the {attribute} of {key}.",
    "Which {attribute} does {key} have?",
    "{key}?",
    "Please look up {key}.",
)
INTRODUCTIONS = (
    "Remember these records.",
    "Here is a list.",
    "Read the notes below, then answer the question.",
    "Use this text to answer.",
    "Here are some facts.",
)


def _key_maker(draw: Draw) -> Callable[[], str]:
    return draw.pick((draw.thing, draw.made_up, draw.person, draw.thing, draw.code))


def _value(draw: Draw, attribute: str) -> str:
    by_attribute: dict[str, Callable[[], str]] = {
        "color": lambda: draw.pick(words.COLOURS),
        "owner": draw.person,
        "city": lambda: draw.pick(words.CITIES),
        "name": draw.made_up,
        "price": lambda: f"{draw.integer(2, 999)} dollars",
        "label": draw.thing,
    }
    return by_attribute.get(attribute, draw.code)()


def _records(draw: Draw, attribute: str, count: int) -> dict[str, str]:
    make = _key_maker(draw)
    records: dict[str, str] = {}
    while len(records) < count:
        records[draw.fresh(make)] = _value(draw, attribute)
    return records


def _context(draw: Draw, lines: list[str], num_fillers: int) -> str:
    """Lines in order, with `num_fillers` short stories strewn between them."""
    paragraphs = list(lines)
    for _ in range(num_fillers):
        paragraphs.insert(draw.integer(0, len(paragraphs)), story(draw))
    return "\n".join(paragraphs)


def recall(draw: Draw, num_tokens: int) -> CorpusDocument:
    """A context of about `num_tokens` tokens and one or more questions, each in a turn of its own.

    `answer` is the value that the last question asks for.
    """
    attribute = draw.pick(words.ATTRIBUTES)
    form = draw.pick(RECORD_FORMS)
    in_prose = draw.chance(0.4)
    count = max(2, num_tokens // (90 if in_prose else 16))
    num_fillers = max(1, (num_tokens - 16 * count) // 75) if in_prose else 0
    records = _records(draw, attribute, count)
    lines = [form.format(attribute=attribute, key=key, value=value) for key, value in records.items()]
    introduction = draw.pick(INTRODUCTIONS)
    if form.count("{attribute}") == 0:
        introduction += f" Each one gives the {attribute}."
    num_questions = draw.integer(1, 4 + num_tokens // 100) if draw.split == "train" else 1
    asked = draw.sample(list(records), min(len(records), num_questions))
    messages: list[Message] = []
    for turn, key in enumerate(asked):
        question = draw.pick(QUESTION_FORMS).format(attribute=attribute, key=key)
        if turn == 0:
            question = f"{introduction}\n{_context(draw, lines, num_fillers)}\n\n{question}"
        messages += [user(question), assistant(f"The {attribute} of {key} is {records[key]}.")]
    return CorpusDocument(task="recall", messages=tuple(messages), answer=records[asked[-1]])


def copying(draw: Draw, num_tokens: int) -> CorpusDocument:
    """Plain text in which random spans come back: the seed of induction, hence of recall."""
    pool = [
        draw.pick((draw.thing, draw.code, draw.made_up, draw.person))()
        for _ in range(max(4, num_tokens // 40))
    ]
    parts: list[str] = []
    for _ in range(max(6, num_tokens // 8)):
        start = draw.integer(0, len(pool) - 1)
        parts += pool[start : start + 3]
    separator = draw.pick((", ", "\n", " ; ", " "))
    return CorpusDocument(task="copying", text=separator.join(parts))
