"""Conversations with the reasoning switch on: the last answer is preceded by a short thought."""

from __future__ import annotations

from dataclasses import replace

from models.corpus.document import CorpusDocument

THOUGHTS = {
    "facts": "The user asks for a fact. I say it in one sentence.",
    "chat": "The user talks to me. I answer kindly and shortly.",
    "recall": "I look for the key in the text and copy its value.",
    "extraction": "I find each field in the text and write JSON.",
    "story": "I write a short story with a beginning, a trouble and a good end.",
    "wordplay": "This is a small exercise with words. I do it step by step.",
}


def with_thought(document: CorpusDocument) -> CorpusDocument:
    """The same document with a thought before its last answer, where the family has one; otherwise
    unchanged."""
    thought = THOUGHTS.get(document.task)
    if thought is None or document.thinking or not document.messages or document.tools:
        return document
    *earlier, last = document.messages
    thinking_last = {**last, "content": f"<think>\n{thought}\n</think>\n\n{last['content']}"}
    return replace(document, messages=(*earlier, thinking_last), thinking=True)
