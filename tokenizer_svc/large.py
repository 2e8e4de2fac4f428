"""Prompts that are too large for the service's own process, which everybody shares.

Parsing tools, options and documents and writing them with a template are Python's work: while it lasts, no
other request goes on. Runs in a worker process. Long texts alone are cheaper, but not for nothing.
"""

from __future__ import annotations

import time
from array import array

from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from services.errors import MillraceError
from tokenizer_svc import convert
from tokenizer_svc.grammar.request import Prompted, PromptRequest, Refused, WorkerReply
from tokenizer_svc.prompt import Prompts

# Tools, documents, options and calls beyond this many bytes are a worker's.
_MAX_STRUCTURED_BYTES = 32 * 1024
# So is everything beyond this many.
_MAX_BYTES = 256 * 1024
# Tags, lengths and numbers around a request's fields.
_FRAMING_BYTES = 64


def is_large(conversation: chat_pb2.Conversation) -> bool:
    """Whether a worker prepares it. Takes microseconds, whatever the size."""
    size = conversation.ByteSize()
    if size <= _MAX_STRUCTURED_BYTES:
        return False
    if size > _MAX_BYTES:
        return True
    texts = sum(each.ByteSize() for each in conversation.messages if not each.tool_calls)
    return size - texts > _MAX_STRUCTURED_BYTES


def text_bytes(request: tokenizer_pb2.PrepareRequest) -> int:
    """About how many bytes the request's text has, never more than there are; the text is not looked at."""
    beside = request.context.ByteSize() + request.response_format.ByteSize() + len(request.model.encode())
    return max(0, request.ByteSize() - beside - _FRAMING_BYTES)


def is_large_text(num_bytes: int) -> bool:
    """The same for a text."""
    return num_bytes > _MAX_BYTES


def prepare(request: PromptRequest, prompts: Prompts, *, max_tool_bytes: int) -> WorkerReply:
    """Rendered and encoded, or why not."""
    if request.text is not None:
        start = time.perf_counter()
        text = tokenizer_pb2.PrepareRequest.FromString(request.text).text
        ids = prompts.encoder.encode_text(text, add_special_tokens=request.add_special_tokens)
        encode_s = time.perf_counter() - start
        return WorkerReply(prompted=Prompted(token_ids=array("I", ids).tobytes(), encode_s=encode_s))
    try:
        conversation = convert.conversation(
            chat_pb2.Conversation.FromString(request.conversation), max_tool_bytes=max_tool_bytes
        )
        prompts.limits.conversation(conversation, request.length)
        start = time.perf_counter()
        rendered = prompts.templates.render(conversation)
        rendered_at = time.perf_counter()
        ids = prompts.encoder.encode_rendered(rendered, tenant=request.tenant).token_ids
        prompts.limits.length(len(ids), request.length, "messages")
        encode_s = time.perf_counter() - rendered_at
        prefix = prompts.assistant_prefix(conversation, rendered)
        grammar = prompts.grammar_request(conversation, request.response_format, prefix)
    except MillraceError as error:
        refused = Refused(
            message=error.message, field=error.field, reason=error.reason, metadata=error.metadata
        )
        return WorkerReply(refused=refused)
    prompted = Prompted(
        token_ids=array("I", ids).tobytes(),
        assistant_prefix=prefix,
        grammar=grammar.encoded() if grammar is not None else None,
        render_s=rendered_at - start,
        encode_s=encode_s,
    )
    return WorkerReply(prompted=prompted)
