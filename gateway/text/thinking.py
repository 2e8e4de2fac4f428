"""The tokens with which a model opens and closes its thoughts, found in its vocabulary."""

from __future__ import annotations

import re

from contract.formats import REASONING, ReasoningForm
from contract.thinking import ThinkingTags
from gateway.text.detokenizer import Vocabulary
from gateway.text.harmony import ENDS

# What a form is made of: marks, words and line breaks.
_PIECES = re.compile(r"<[^<>]+>|\[[^\[\]]+\]|\n|[^<\[\n]+")


def form_of(vocabulary: Vocabulary) -> ReasoningForm:
    """What stands around the thoughts of a model; that of most where it does not think."""
    return REASONING.get(vocabulary.reasoning_format, REASONING["think"])


def thinking_tags(vocabulary: Vocabulary) -> ThinkingTags | None:
    """The tags around a thought that no prompt has begun; None where they are no tokens of their own, so that
    nobody can force them as such, or where a thought could begin unseen.
    """
    form = form_of(vocabulary)
    ids = _ids(vocabulary)
    opening, closing = _tokens(form.open, ids), _tokens(form.close, ids)
    close_id, *lead = closing or [None]
    # Only the tags of most are also written letter by letter, by prompts that begin the thought.
    if close_id is None or None in lead or (opening[0] is None and form is not REASONING["think"]):
        return None
    open_id, *rest = opening
    if lead:
        # The answer is a message, and so is each thought.
        answer = [*lead, *_tokens(form.answer_open, ids)]
        if None in answer or None in rest:
            return None
        return ThinkingTags(
            open_id=open_id,
            close_id=close_id,
            opened=False,
            open_rest=_known(rest),
            lead=_known(lead),
            answer=_known(answer),
            other_ends=tuple({ids[end.encode()] for end in ENDS if end.encode() in ids} - {close_id}),
        )
    line_breaks: tuple[int, ...] = ()
    if (one := ids.get(b"\n")) is not None:
        others = (token_id for text, token_id in ids.items() if not text.strip(b"\n") and token_id != one)
        line_breaks = (one, *sorted(others))
    blank_line = (ids[b"\n\n"],) if b"\n\n" in ids else line_breaks[:1] * 2
    return ThinkingTags(
        open_id=open_id,
        close_id=close_id,
        opened=False,
        line_breaks=line_breaks,
        # A thought with a name has its line break there, and none before the answer.
        blank_line=blank_line if line_breaks and not rest else (),
        name=() if None in rest else _known(rest),
    )


def _ids(vocabulary: Vocabulary) -> dict[bytes, int]:
    """The token of each text."""
    ids: dict[bytes, int] = {}
    for token_id, text in enumerate(vocabulary.tokens):
        # Beside a piece of text the token of its one byte is never written.
        if text and (token_id not in vocabulary.byte_ids or text not in ids):
            ids[text] = token_id if text not in ids or ids[text] in vocabulary.byte_ids else ids[text]
    return ids


def _tokens(text: str, ids: dict[bytes, int]) -> list[int | None]:
    """The tokens that a form is written in; None for those that are not there."""
    return [ids.get(piece.encode()) for piece in _PIECES.findall(text)]


def _known(tokens: list[int | None]) -> tuple[int, ...]:
    return tuple(token for token in tokens if token is not None)
