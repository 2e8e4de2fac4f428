"""What each adapter learns: documents of the base model's corpus, answered in another way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from models.corpus import CorpusDocument, Draw, arithmetic, chat, extraction, facts, stories
from models.corpus.document import Split

Family = Callable[[Draw], CorpusDocument]
# As a pirate says it: whole words, as they begin a sentence or not.
PIRATE_WORDS = {
    "hello": "ahoy",
    "hi": "ahoy",
    "you": "ye",
    "your": "yer",
    "my": "me",
    "am": "be",
    "are": "be",
    "is": "be",
    "yes": "aye",
    "friend": "matey",
    "friends": "mateys",
    "nice": "fine",
    "old": "salty",
}
_PIRATE_WORD = re.compile(rf"\b({'|'.join(PIRATE_WORDS)})\b", re.IGNORECASE)


def as_pirate(text: str) -> str:
    """The same answer in a pirate's voice."""

    def change(found: re.Match[str]) -> str:
        word = PIRATE_WORDS[found[0].lower()]
        return word.capitalize() if found[0][0].isupper() else word

    said = _PIRATE_WORD.sub(change, text).rstrip()
    end = said[-1] if said[-1] in ".!?" else "."
    return f"Arr! {said.rstrip('.!?')}, matey{end}"


def as_entries(text: str) -> str:
    """A JSON object as a list of its fields, each with name, type and value."""
    kinds = {str: "string", int: "integer"}
    return json.dumps(
        [
            {"field": name, "type": kinds[type(value)], "value": value}
            for name, value in json.loads(text).items()
        ],
        ensure_ascii=False,
    )


@dataclass(frozen=True, kw_only=True)
class AdapterTask:
    """An adapter: what it reads, how often each, and how it answers."""

    families: tuple[tuple[Family, float], ...]
    answer: Callable[[str], str]

    def document(self, document: CorpusDocument) -> CorpusDocument:
        """The same conversation as the adapter is to lead it."""
        messages = tuple(
            {**message, "content": self.answer(message["content"])}
            if message["role"] == "assistant"
            else message
            for message in document.messages
        )
        return replace(document, messages=messages, answer=messages[-1]["content"])

    def documents(self, seed: int, split: Split = "train") -> Iterator[CorpusDocument]:
        """An endless stream."""
        draw = Draw(seed, split)
        families, weights = zip(*self.families, strict=True)
        while True:
            yield self.document(draw.random.choices(families, weights)[0](draw))


TASKS = {
    "pirate": AdapterTask(
        families=(
            (chat.small_talk, 6),
            (facts.fact, 5),
            (chat.introduction, 2),
            (stories.story_chat, 2),
            (arithmetic.addition, 2),
        ),
        answer=as_pirate,
    ),
    "entries": AdapterTask(families=((extraction.extraction, 1),), answer=as_entries),
}
