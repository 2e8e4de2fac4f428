"""Refuses what is too large before any work is spent on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import (
    ChoiceFormat,
    Conversation,
    Message,
    ResponseFormat,
    Role,
)
from contract.errors import MillraceError, Reason, context_length
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.messages.wire import MAX_PARSED_BYTES
from tokenizer_svc.refusals import invalid, too_large
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import LengthLimit, Truncation

# Which requests are too large for the service's own process, which everybody shares.
# Parsing tools, options, documents and schemas and writing them with a template are Python's work: while it
# lasts, no other request goes on. It is done in a worker process. Long texts alone are cheaper, but not for
# nothing.

# Tools, documents, options, calls and response formats beyond this many bytes are a worker's.
_MAX_STRUCTURED_BYTES = 32 * 1024
# Everything beyond MAX_PARSED_BYTES is a worker's, too. Against both limits a request counts more than its
# bytes, because some parts are more work than they have bytes: messages, tools, documents, listed texts, and
# characters at which a control token might be spelled, which begins with one of these in most vocabularies.
_MESSAGE_BYTES = 1024
_PART_BYTES = 512
_TEXT_BYTES = 64
_SPELLING_BYTES = 32
_SPELLINGS = "<["
# Python needs longer for ids than for as many bytes of text.
_MAX_ID_BYTES = 32 * 1024


def is_large(request: tokenizer_pb2.PrepareRequest) -> bool:
    """Whether a worker prepares it. Answers within microseconds, except for large requests."""
    if request.response_format.ByteSize() > _MAX_STRUCTURED_BYTES:
        return True
    match request.WhichOneof("input"):
        case "conversation":
            return _is_large_conversation(request.conversation, num_renderings(request))
        case "text":
            text = request.text
            return len(text) > MAX_PARSED_BYTES // 4 and len(text.encode()) > MAX_PARSED_BYTES
        case "texts":
            return _is_large_list(request.texts)
        case _:
            return request.encoded.ByteSize() > _MAX_ID_BYTES


def _is_large_list(texts: tokenizer_pb2.TextList) -> bool:
    size = texts.ByteSize() + _TEXT_BYTES * len(texts.texts)
    return size > MAX_PARSED_BYTES or sum(each.encoded.ByteSize() for each in texts.texts) > _MAX_ID_BYTES


def num_renderings(request: tokenizer_pb2.PrepareRequest) -> int:
    """How often a conversation may be written until few enough of its turns are left; 1 where none may go."""
    return max(1, len(request.conversation.messages).bit_length()) if request.truncation else 1


def _is_large_conversation(conversation: chat_pb2.Conversation, times: int) -> bool:
    messages = conversation.messages
    num_parts = times * (len(conversation.tools) + len(conversation.documents))
    size = times * conversation.ByteSize()
    beside = _MESSAGE_BYTES * times * len(messages) + _PART_BYTES * num_parts
    if size + beside <= _MAX_STRUCTURED_BYTES:
        return False
    if size + beside > MAX_PARSED_BYTES:
        return True
    texts = times * sum(each.ByteSize() for each in messages if not each.tool_calls)
    if size - texts + _PART_BYTES * num_parts > _MAX_STRUCTURED_BYTES:
        return True
    spelled = sum(each.content.count(first) for each in messages for first in _SPELLINGS)
    return size + beside + _SPELLING_BYTES * spelled > MAX_PARSED_BYTES


# Unicode composition (NFC) makes UTF-8 at most this much shorter (UAX 15).
_COMPOSITION = 3
# The longest character of UTF-8; also more than the bytes around an option on the wire.
MAX_CHARACTER_BYTES = 4


class RequestLimits:
    """The limits of one service with its checkpoint."""

    def __init__(
        self, config: PromptLimitsConfig, checkpoint: Checkpoint, *, writes_user_turns: bool
    ) -> None:
        self._config = config
        self._num_tokens = len(checkpoint.vocabulary.tokens)
        self._max_token_bytes = longest_token(checkpoint.description, checkpoint.vocabulary.tokens)
        self._writes_user_turns = writes_user_turns

    def conversation(self, conversation: Conversation, length: LengthLimit) -> None:
        """Raises INVALID_ARGUMENT, REQUEST_TOO_LARGE, and CONTEXT_LENGTH_EXCEEDED where that is certain."""
        if length.truncation is Truncation.KEEP_START:
            raise invalid("of a conversation the end is kept; its oldest turns are left out", "truncation")
        if not conversation.messages:
            raise invalid("messages must hold at least one message", "messages")
        self.size(sum(map(_size, conversation.messages)), "messages")
        if self._writes_user_turns and length.truncation is Truncation.REFUSE:
            # Users' messages alone, because templates may leave out parts of the others.
            user = sum(
                num_bytes(each.content.strip()) for each in conversation.messages if each.role is Role.USER
            )
            self.bytes_against_tokens(user, length, "messages")
        for index, tool in enumerate(conversation.tools):
            if not tool.name:
                raise invalid(f"tool {index} has no name", f"tools[{index}].function.name")

    def text_size(self, num_bytes: int, length: LengthLimit, field: str) -> None:
        """The same for a plain prompt of so many bytes."""
        self.size(num_bytes, field)
        if length.truncation is Truncation.REFUSE:
            self.bytes_against_tokens(num_bytes, length, field)

    def format(self, form: ResponseFormat | None) -> None:
        """Raises GRAMMAR_REFUSED for what is too large to be compiled."""
        if isinstance(form, ChoiceFormat):
            if not form.options:
                raise invalid("choice needs at least one option", "response_format.choice")
            # With the quotes and the bar that the grammar has for each.
            self.grammar_size(sum(map(len, form.options)) + 5 * len(form.options), "response_format.choice")
        elif form is not None:
            # The others are one text each, and any JSON object is none.
            text = next(iter(msgspec.structs.astuple(form)), "")
            self.grammar_size(len(text), f"response_format.{form.__struct_config__.tag}")

    def large(self, kind: str, num_input_bytes: int, num_format_bytes: int, length: LengthLimit) -> str:
        """Checks the sizes of a request's fields on the wire; the name of the field that has the prompt.

        Raises like `conversation`, `text_size` and `format`, which look closer.
        """
        if num_format_bytes > MAX_CHARACTER_BYTES * self._config.max_grammar_bytes:
            self.grammar_size(num_format_bytes, "response_format")
        if kind == "conversation":
            self.whole(num_input_bytes, 0, 0)
            return "messages"
        if kind == "text":
            self.text_size(num_input_bytes, length, "prompt")
        if kind == "texts":
            self.size(num_input_bytes, "texts")
        return "texts" if kind == "texts" else "prompt"

    def grammar_size(self, size: int, field: str) -> None:
        """Raises GRAMMAR_REFUSED."""
        if size > self._config.max_grammar_bytes:
            raise MillraceError(
                Reason.GRAMMAR_REFUSED,
                f"{size} bytes; the limit is {self._config.max_grammar_bytes}: use a smaller one",
                field=field,
            )

    def size(self, size: int, field: str) -> None:
        """Raises REQUEST_TOO_LARGE."""
        if size > self._config.max_prompt_bytes:
            raise too_large(f"a prompt of {size} bytes", self._config.max_prompt_bytes, field)

    def whole(self, size: int, num_messages: int, num_tools: int) -> None:
        """Raises REQUEST_TOO_LARGE for a conversation with too many parts, or that its tools, options and
        documents make too large. What its texts alone may have is looked at apart.
        """
        limits, field = self._config, "messages"
        if num_messages > limits.max_messages:
            raise too_large(f"{num_messages} messages", limits.max_messages, "messages")
        if num_tools > limits.max_tools:
            raise too_large(f"{num_tools} tools", limits.max_tools, "tools")
        limit = limits.max_prompt_bytes + limits.max_grammar_bytes
        if size > limit:
            raise too_large(f"a conversation of {size} bytes with its tools and documents", limit, field)

    def batch(self, texts: Sequence[str], field: str) -> int:
        """Bytes of all texts together; raises REQUEST_TOO_LARGE for too many of either."""
        if len(texts) > self._config.max_batch_texts:
            raise too_large(f"{len(texts)} texts", self._config.max_batch_texts, field)
        size = sum(map(num_bytes, texts))
        self.size(size, field)
        return size

    def num_ids(self, num_ids: int, length: LengthLimit, field: str) -> None:
        """Raises REQUEST_TOO_LARGE or CONTEXT_LENGTH_EXCEEDED for too many ids, before they are looked at."""
        limit = self._config.max_prompt_bytes // 4
        if num_ids > limit:
            raise too_large(f"{num_ids} token ids", limit, field)
        if length.truncation is Truncation.REFUSE:
            self.length(num_ids, length, field)

    def ids(self, token_ids: list[int], field: str) -> None:
        """Raises INVALID_ARGUMENT for ids that the vocabulary does not have."""
        if max(token_ids, default=0) < self._num_tokens:
            return
        index = next(index for index, each in enumerate(token_ids) if each >= self._num_tokens)
        raise invalid(
            f"token id {token_ids[index]} is outside the vocabulary of {self._num_tokens} tokens",
            f"{field}[{index}]",
        )

    def bytes_against_tokens(self, num_bytes: int, length: LengthLimit, field: str) -> None:
        """Raises CONTEXT_LENGTH_EXCEEDED when so many bytes cannot be few enough tokens."""
        limit = self.max_tokens(length)
        if limit is None or not self._max_token_bytes:
            return
        least = -(-num_bytes // self._max_token_bytes)
        if least > limit:
            raise _too_long(f"{num_bytes} bytes, which are at least {least} tokens", least, limit, field)

    def length(self, num_tokens: int, length: LengthLimit, field: str) -> None:
        """Raises CONTEXT_LENGTH_EXCEEDED."""
        limit = self.max_tokens(length)
        if limit is not None and num_tokens > limit:
            raise _too_long(f"{num_tokens} tokens", num_tokens, limit, field)

    def max_tokens(self, length: LengthLimit) -> int | None:
        """The lower of the service's and the request's limits; None when there is none."""
        own = self._config.max_prompt_tokens
        limits = [each for each in (own, length.max_tokens) if each]
        return min(limits, default=None)


def longest_token(description: dict[str, Any], tokens: list[bytes]) -> int:
    """Most bytes of text that one token can stand for; 0 when there is no such bound.

    There is one where nothing of a text gets lost on its way: every byte ends up in some token.
    """
    added = description.get("added_tokens", ())
    if any(each["lstrip"] or each["rstrip"] for each in added) or not _keeps_every_byte(description):
        return 0
    shrinks = _shrinking(description.get("normalizer"))
    if shrinks is None:
        return 0
    return max(map(len, tokens), default=0) * shrinks


def _keeps_every_byte(description: dict[str, Any]) -> bool:
    if description["model"].get("byte_fallback"):
        return True
    steps = description.get("pre_tokenizer") or {}
    kinds = {each["type"] for each in steps.get("pretokenizers", (steps,)) if each}
    return "ByteLevel" in kinds


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How much shorter normalizing makes a text at most; None for those that are not known."""
    if normalizer is None:
        return 1
    steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    factor = 1
    for step in steps:
        if step["type"] == "NFC":
            factor = _COMPOSITION
        elif step["type"] != "Prepend" and not _spells_spaces(step):
            return None
    return factor


def _spells_spaces(step: dict[str, Any]) -> bool:
    replaced = step.get("pattern"), step.get("content")
    return bool(step["type"] == "Replace" and replaced == ({"String": " "}, "▁"))


def _size(message: Message) -> int:
    calls = sum(num_bytes(call.arguments_json) for call in message.tool_calls)
    return num_bytes(message.content) + num_bytes(message.reasoning) + calls


def num_bytes(text: str) -> int:
    """Of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode())


def _too_long(what: str, num_tokens: int, limit: int, field: str) -> MillraceError:
    return MillraceError(
        Reason.CONTEXT_LENGTH_EXCEEDED,
        context_length(limit, f"the prompt has {what}; shorten the prompt"),
        field=field,
        metadata={"prompt_tokens": str(num_tokens), "max_context_tokens": str(limit)},
    )
