"""Which requests are too large for the service's own process, which everybody shares.

Parsing tools, options, documents and schemas and writing them with a template are Python's work: while it
lasts, no other request goes on. It is done in a worker process. Long texts alone are cheaper, but not for
nothing.
"""

from __future__ import annotations

from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from tokenizer_svc.messages.wire import MAX_PARSED_BYTES

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
            return _is_large_conversation(request.conversation)
        case "text":
            text = request.text
            return len(text) > MAX_PARSED_BYTES // 4 and len(text.encode()) > MAX_PARSED_BYTES
        case _:
            return request.encoded.ByteSize() > _MAX_ID_BYTES


def _is_large_conversation(conversation: chat_pb2.Conversation) -> bool:
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
