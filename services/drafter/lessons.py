"""Conversations and texts of a JSONL file as token ids, by the model's own template, and which of them are
learned: answers, and all of a text.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import Tokenizer

from runtime.errors import ConfigError
from tokenizer_svc.text import sandbox
from tokenizer_svc.text.checkpoint import DEFAULT_TEMPLATE, Checkpoint, load_checkpoint


@dataclass(frozen=True)
class Lesson:
    """Token ids, of which the first few are not learned."""

    ids: Sequence[int]
    num_given: int


class LessonRow(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class LessonWriter:
    """Writes conversations as the model reads them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
        source = checkpoint.templates.get(DEFAULT_TEMPLATE)
        self._template = None if source is None else sandbox.environment().from_string(source)
        self._special = checkpoint.special_tokens

    @property
    def has_template(self) -> bool:
        """Whether it can write conversations."""
        return self._template is not None

    def ids(self, text: str, *, special: bool = False) -> list[int]:
        """Of a text, by itself or as the model's texts begin and end."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return found

    def render(self, row: LessonRow, messages: Sequence[dict[str, Any]], *, asks: bool) -> str:
        """A conversation as text; `asks` says that the model's turn comes next. Raises ConfigError."""
        if self._template is None:
            raise ConfigError(
                "the model has no chat template, so it cannot learn from messages; give lines with text"
            )
        values = {"messages": list(messages), "tools": row.tools or None, "add_generation_prompt": asks}
        return self._template.render(**self._special, **values)


def read_lessons(path: Path, model: Path, max_tokens: int) -> list[Lesson]:
    """What a file teaches a model, those left out that are longer. Raises ConfigError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ConfigError(f"--data {path}: {error.strerror or error}; name a file of JSON lines") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from error
    writer = LessonWriter(load_checkpoint(model))
    lessons = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            lesson = _lesson(msgspec.json.decode(line, type=LessonRow), writer)
        except (msgspec.DecodeError, jinja2.TemplateError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}:{number}: {error}; a line is one JSON object with messages, and perhaps tools, or "
                "with text"
            ) from error
        # The first draft follows two tokens that are known.
        if lesson is not None and max(lesson.num_given, 2) < len(lesson.ids) <= max_tokens:
            lessons.append(lesson)
    if not lessons:
        raise ConfigError(
            f"{path}: no line of it has an answer that fits in {max_tokens} tokens; raise --max-tokens, or "
            "give other lines"
        )
    return lessons


def _lesson(row: LessonRow, writer: LessonWriter) -> Lesson | None:
    """What a line teaches; None where its answer does not follow from how the template asks for one."""
    if (row.text is None) == (row.messages is None):
        raise ValueError("give either text or messages")
    if row.text is not None:
        return Lesson(writer.ids(row.text, special=True), 0)
    assert row.messages is not None, "one of both is there"
    if not row.messages:
        raise ValueError("messages are empty")
    before = writer.render(row, row.messages[:-1], asks=True)
    whole = writer.render(row, row.messages, asks=False)
    if not whole.startswith(before):
        return None
    prompt = writer.ids(before)
    return Lesson(prompt + writer.ids(whole[len(before) :]), len(prompt))


def digest(lessons: Sequence[Lesson]) -> str:
    """SHA-256 of what is learned."""
    found = hashlib.sha256()
    for lesson in lessons:
        found.update(repr((lesson.num_given, tuple(lesson.ids))).encode())
    return found.hexdigest()


def batches(lessons: Sequence[Lesson], num_rows: int, first: int) -> Iterator[list[Lesson]]:
    """Endless batches of lessons of like lengths, from the one numbered `first` on: the same in every run."""
    ordered = sorted(lessons, key=lambda lesson: len(lesson.ids))
    groups = [ordered[begin : begin + num_rows] for begin in range(0, len(ordered), num_rows)]
    epoch, skipped = divmod(first, len(groups))
    while True:
        shuffled = random.Random(epoch).sample(groups, len(groups))
        yield from shuffled[skipped:]
        epoch, skipped = epoch + 1, 0
