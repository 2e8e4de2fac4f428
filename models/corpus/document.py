"""What a training example is, how its text is drawn, and how training and evaluation are kept apart.

Every random key that a question is about (a record's name, a pair of summands, a person) passes
`Draw.fresh`. A checksum of that
key decides, once and for all, whether it belongs to training or to evaluation, so no evaluated key is ever
trained on,
whatever the seeds are.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from models.corpus import words

Message = dict[str, Any]
Tool = dict[str, Any]
Split = Literal["train", "eval"]
Item = TypeVar("Item")

HELD_OUT_SHARE = 8
"""One key in this many belongs to evaluation."""


@dataclass(frozen=True, kw_only=True)
class CorpusDocument:
    """One example: a conversation, or plain text when `messages` is empty."""

    task: str
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    text: str = ""
    answer: str = ""
    thinking: bool = False


def is_held_out(key: str) -> bool:
    """Whether `key` belongs to the evaluation split."""
    return zlib.crc32(key.encode()) % HELD_OUT_SHARE == 0


class Draw:
    """A seeded source of words, names, codes and numbers for one split."""

    def __init__(self, seed: int, split: Split = "train") -> None:
        self.random = random.Random(f"{split}-{seed}")
        self.split: Split = split

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, items: Sequence[Item]) -> Item:
        return items[int(self.random.random() * len(items))]

    def integer(self, low: int, high: int) -> int:
        """Uniform in [low, high]."""
        return self.random.randint(low, high)

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        return self.random.sample(list(items), count)

    def fresh(self, make: Callable[[], str]) -> str:
        """Call `make` until it yields a key of this split."""
        while True:
            key = make()
            if is_held_out(key) == (self.split == "eval"):
                return key

    def digits(self, count: int) -> str:
        return "".join(self.pick("0123456789") for _ in range(count))

    def code(self) -> str:
        """Such as `KX-482` or `58213`."""
        shape = self.integer(0, 3)
        letters = "".join(self.pick(words.LETTERS) for _ in range(self.integer(1, 3)))
        if shape == 0:
            return f"{letters}-{self.digits(self.integer(2, 4))}"
        if shape == 1:
            return f"{letters}{self.digits(self.integer(2, 4))}"
        return self.digits(self.integer(3, 6))

    def made_up(self) -> str:
        """A pronounceable word that exists in no list, such as `Vorani`."""
        syllables = (self.pick(words.CONSONANTS) + self.pick(words.VOWELS) for _ in range(self.integer(2, 3)))
        return ("".join(syllables) + self.pick(("", "n", "r", "s", "l"))).capitalize()

    def person(self) -> str:
        return f"{self.pick(words.FIRST_NAMES)} {self.pick(words.LAST_NAMES)}"

    def thing(self) -> str:
        return f"{self.pick(words.ADJECTIVES)} {self.pick(words.NOUNS)}"


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
