"""The tokens with which a model opens and closes its thoughts, found in its vocabulary."""

from __future__ import annotations

from contract.formats import THINK_CLOSE, THINK_OPEN
from contract.thinking import ThinkingTags
from gateway.text.detokenizer import Vocabulary


def thinking_tags(vocabulary: Vocabulary) -> ThinkingTags | None:
    """The tags around a thought that no prompt has begun; None where the closing one is no token of its own,
    so that nobody can force it as one.
    """
    ids: dict[bytes, int] = {}
    for token_id, text in enumerate(vocabulary.tokens):
        # Beside a piece of text the token of its one byte is never written.
        if text and (token_id not in vocabulary.byte_ids or text not in ids):
            ids[text] = token_id if text not in ids or ids[text] in vocabulary.byte_ids else ids[text]
    close_id = ids.get(THINK_CLOSE.encode())
    if close_id is None:
        return None
    line_breaks: tuple[int, ...] = ()
    if (one := ids.get(b"\n")) is not None:
        others = (token_id for text, token_id in ids.items() if not text.strip(b"\n") and token_id != one)
        line_breaks = (one, *sorted(others))
    blank_line = (ids[b"\n\n"],) if b"\n\n" in ids else line_breaks[:1] * 2
    return ThinkingTags(
        open_id=ids.get(THINK_OPEN.encode()),
        close_id=close_id,
        opened=False,
        line_breaks=line_breaks,
        blank_line=blank_line if line_breaks else (),
    )
