"""The tokens with which a model opens and closes its thoughts, found in its vocabulary."""

from __future__ import annotations

from contract.formats import REASONING, ReasoningForm
from contract.thinking import ThinkingTags
from gateway.text.detokenizer import Vocabulary


def form_of(vocabulary: Vocabulary) -> ReasoningForm:
    """What stands around the thoughts of a model; that of most where it does not think."""
    return REASONING.get(vocabulary.reasoning_format, REASONING["think"])


def thinking_tags(vocabulary: Vocabulary) -> ThinkingTags | None:
    """The tags around a thought that no prompt has begun; None where the closing one is no token of its own,
    so that nobody can force it as one, or where a thought could begin unseen.
    """
    form = form_of(vocabulary)
    ids: dict[bytes, int] = {}
    for token_id, text in enumerate(vocabulary.tokens):
        # Beside a piece of text the token of its one byte is never written.
        if text and (token_id not in vocabulary.byte_ids or text not in ids):
            ids[text] = token_id if text not in ids or ids[text] in vocabulary.byte_ids else ids[text]
    open_id, close_id = ids.get(form.open.encode()), ids.get(form.close.encode())
    # Only the tags of most are also written letter by letter, by prompts that begin the thought.
    if close_id is None or (open_id is None and form is not REASONING["think"]):
        return None
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
        blank_line=blank_line if line_breaks else (),
    )
