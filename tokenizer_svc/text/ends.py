"""Ends of answers that a checkpoint's files do not name, and only its chat template implies.

A model that was trained on a template ends each turn as the template does. Where the files name other ends
alone, which the template never writes, its answers would run on through the token that it ends them with.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import msgspec

from contract.chat import Conversation, Message, Role
from contract.errors import MillraceError
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.text.encoding import KNOWN_MARKUP, ControlTokens
from tokenizer_svc.text.template import ChatTemplates

_log = logging.getLogger(__name__)
_PROBE = "probe of an answer"


def with_implied_end(checkpoint: Checkpoint, limits: PromptLimitsConfig) -> Checkpoint:
    """The checkpoint with the end that its template implies, where it implies one; that is logged."""
    added = checkpoint.description.get("added_tokens", [])
    found = _implied(checkpoint, limits, added)
    if found is None:
        return checkpoint
    token_id = next(each["id"] for each in added if each["content"] == found)
    _log.warning(
        "%s: none of its files names an end of answers that its chat template writes; %s (id %d), which the "
        "template writes behind an assistant's turn, ends them, too",
        checkpoint.path,
        found,
        token_id,
    )
    ends = (*checkpoint.eos_token_ids, token_id)
    return msgspec.structs.replace(checkpoint, eos_token_ids=ends)


def _implied(checkpoint: Checkpoint, limits: PromptLimitsConfig, added: list[dict[str, Any]]) -> str | None:
    texts = {str(each["content"]): each["id"] for each in added if not str(each["content"]).isspace()}
    candidates = texts.keys() - KNOWN_MARKUP - {checkpoint.special_tokens.get("bos_token", "")}
    # Harmony ends each channel of an answer as it ends the answers before.
    if not checkpoint.templates or not candidates or checkpoint.reasoning_format == "harmony":
        return None
    control = ControlTokens(added, checkpoint.templates.values())
    templates = ChatTemplates(checkpoint.templates, checkpoint.special_tokens, control, limits)
    question = Message(role=Role.USER, content="q")
    turns = (question, Message(role=Role.ASSISTANT, content=_PROBE), question)
    try:
        rendered = templates.render(Conversation(messages=turns))
    except MillraceError:
        return None
    source = "\n".join((rendered, *checkpoint.templates.values()))
    if any(text in source for text, token_id in texts.items() if token_id in checkpoint.eos_token_ids):
        # It knows one of the ends that are named, whatever else it writes.
        return None
    _, written, behind = rendered.partition(_PROBE)
    longest_first = sorted(map(re.escape, candidates), key=len, reverse=True)
    match = re.match(rf"\s*({'|'.join(longest_first)})", behind) if written else None
    return None if match is None else match[1]
