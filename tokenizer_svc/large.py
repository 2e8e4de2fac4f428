"""Requests that are too large for the service's own process, which everybody shares.

Parsing tools, options, documents and schemas and writing them with a template are Python's work: while it
lasts, no other request goes on. Runs in a worker process. Long texts alone are cheaper, but not for nothing.
"""

from __future__ import annotations

import time
from typing import Any

from google.protobuf.message import DecodeError
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import ResponseFormat
from contract.errors import MillraceError, Reason
from tokenizer_svc import convert
from tokenizer_svc.grammar.request import GrammarRequest, Prompted, PromptRequest, Refused, WorkerReply
from tokenizer_svc.limits import no_input
from tokenizer_svc.prompt import Prompts
from tokenizer_svc.types import Truncation
from tokenizer_svc.wire import MAX_PARSED_BYTES, NO_REQUEST, packed_ids

# Tools, documents, options, calls and response formats beyond this many bytes are a worker's.
_MAX_STRUCTURED_BYTES = 32 * 1024
# So is everything beyond MAX_PARSED_BYTES. Against both limits counts, beside its bytes, what makes work that
# is not in them: each message, each tool or document, and each place in a text where a control token might be
# spelled, which begins so in most vocabularies.
_MESSAGE_BYTES = 1024
_PART_BYTES = 512
_SPELLING_BYTES = 32
_SPELLINGS = "<["
# Ids take Python longer than text.
_MAX_ID_BYTES = 32 * 1024


def is_large(request: tokenizer_pb2.PrepareRequest) -> bool:
    """Whether a worker prepares it. Takes microseconds, except for large requests."""
    if request.response_format.ByteSize() > _MAX_STRUCTURED_BYTES:
        return True
    match request.WhichOneof("input"):
        case "conversation":
            return is_large_conversation(request.conversation)
        case "text":
            return is_large_text(request.text)
        case _:
            return request.encoded.ByteSize() > _MAX_ID_BYTES


def is_large_conversation(conversation: chat_pb2.Conversation) -> bool:
    """The same for a conversation."""
    messages, num_parts = conversation.messages, len(conversation.tools) + len(conversation.documents)
    size = conversation.ByteSize()
    beside = _MESSAGE_BYTES * len(messages) + _PART_BYTES * num_parts
    if size + beside <= _MAX_STRUCTURED_BYTES:
        return False
    if size + beside > MAX_PARSED_BYTES:
        return True
    texts = sum(each.ByteSize() for each in messages if not each.tool_calls)
    if size - texts + _PART_BYTES * num_parts > _MAX_STRUCTURED_BYTES:
        return True
    spelled = sum(each.content.count(first) for each in messages for first in _SPELLINGS)
    return size + beside + _SPELLING_BYTES * spelled > MAX_PARSED_BYTES


def is_large_text(text: str) -> bool:
    """The same for a text."""
    return len(text) > MAX_PARSED_BYTES // 4 and len(text.encode()) > MAX_PARSED_BYTES


def prepare(request: PromptRequest, prompts: Prompts, *, max_tool_bytes: int) -> WorkerReply:
    """Rendered and encoded, or why not."""
    try:
        # Parsers take views as well, which their types do not say.
        parse: Any = tokenizer_pb2.PrepareRequest.FromString
        message: tokenizer_pb2.PrepareRequest = parse(request.wire)
        form = convert.response_format(message.response_format)
        prompts.limits.format(form)
        if message.WhichOneof("input") == "conversation":
            return _conversation(message.conversation, form, request, prompts, max_tool_bytes)
        return _text(message, form, request, prompts)
    except DecodeError:
        return WorkerReply(refused=Refused(message=NO_REQUEST, field="", reason=Reason.MALFORMED_BODY))
    except MillraceError as error:
        refused = Refused(
            message=error.message, field=error.field, reason=error.reason, metadata=error.metadata
        )
        return WorkerReply(refused=refused)


def _conversation(
    message: chat_pb2.Conversation,
    form: ResponseFormat | None,
    request: PromptRequest,
    prompts: Prompts,
    max_tool_bytes: int,
) -> WorkerReply:
    prompts.limits.whole(message.ByteSize(), num_messages=len(message.messages), num_tools=len(message.tools))
    conversation = convert.conversation(message, max_tool_bytes=max_tool_bytes)
    prompts.limits.conversation(conversation, request.length)
    start = time.perf_counter()
    rendered = prompts.templates.render(conversation)
    rendered_at = time.perf_counter()
    ids = prompts.encoder.encode_rendered(rendered, tenant=request.tenant).token_ids
    prompts.limits.length(len(ids), request.length, "messages")
    encode_s = time.perf_counter() - rendered_at
    prefix = prompts.assistant_prefix(conversation, rendered)
    grammar = prompts.grammar_request(conversation, form, prefix)
    prompted = Prompted(
        packed_ids=memoryview(packed_ids(ids)),
        num_tokens=len(ids),
        assistant_prefix=prefix,
        grammar=grammar.encoded() if grammar is not None else None,
        render_s=rendered_at - start,
        encode_s=encode_s,
    )
    return WorkerReply(prompted=prompted)


def _text(
    message: tokenizer_pb2.PrepareRequest,
    form: ResponseFormat | None,
    request: PromptRequest,
    prompts: Prompts,
) -> WorkerReply:
    limits, length = prompts.limits, request.length
    start = time.perf_counter()
    match message.WhichOneof("input"):
        case "text":
            limits.text(message.text, length, "prompt")
            ids = prompts.encoder.encode_text(message.text, add_special_tokens=request.add_special_tokens)
        case "encoded":
            limits.num_ids(len(message.encoded.ids), length, "prompt")
            ids = list(message.encoded.ids)
            limits.ids(ids, "prompt")
        case _:
            raise no_input()
    kept = ids
    if length.truncation is not Truncation.REFUSE:
        kept = prompts.encoder.truncated(ids, limits.max_tokens(length), length.truncation)
    limits.length(len(kept), length, "prompt")
    prompted = Prompted(
        packed_ids=memoryview(packed_ids(kept)),
        num_tokens=len(kept),
        num_truncated=len(ids) - len(kept),
        encode_s=time.perf_counter() - start,
        grammar=GrammarRequest(response_format=form).encoded() if form is not None else None,
    )
    return WorkerReply(prompted=prompted)
