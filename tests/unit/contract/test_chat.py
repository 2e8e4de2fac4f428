"""What is too much for the messages of a conversation is refused before it is written, or read."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import struct_pb2
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.chat import Conversation, Message, Role
from contract.errors import MillraceError, Reason
from contract.proto import chat


def nested(levels: int) -> dict[str, Any]:
    """Alternates objects, which take three levels of protobuf, and lists, which take two."""
    value: Any = 1
    for level in range(levels - 1):
        value = {"a": value} if level % 4 else [value]
    return {"a": value}


def conversation(document: dict[str, Any], options: dict[str, Any]) -> Conversation:
    return Conversation(
        messages=(Message(role=Role.USER, content="x"),),
        documents=(document,) if document else (),
        template_options=options,
    )


def on_the_stream(fields: Any) -> bytes:
    call = tokenizer_pb2.PrepareCall(id=1, request=tokenizer_pb2.PrepareRequest(conversation=fields))
    return tokenizer_pb2.PrepareStreamRequest(calls=[call]).SerializeToString()


@pytest.mark.parametrize("levels", range(1, 16))
def test_the_service_can_read_what_is_nested_as_deeply_as_is_allowed(levels: int) -> None:
    for document, options in ((nested(levels), {}), ({}, nested(levels))):
        wire = on_the_stream(chat.conversation_fields(conversation(document, options)))
        assert tokenizer_pb2.PrepareStreamRequest.FromString(wire).calls[0].id == 1


# From 32 on the gateway cannot write it; somewhat below, the service cannot read what the gateway writes.
@pytest.mark.parametrize("levels", range(17, 50))
def test_what_is_nested_more_deeply_is_refused(levels: int) -> None:
    for document, options, field in (
        (nested(levels), {}, "documents"),
        ({}, nested(levels), "template_options"),
    ):
        with pytest.raises(MillraceError, match="nested more than 16 levels") as refused:
            chat.conversation_fields(conversation(document, options))
        assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)


def test_more_values_than_are_written_in_a_moment_are_refused() -> None:
    assert chat.conversation_fields(conversation({"a": [1] * 16_000, "b": "x" * 1_000_000}, {}))
    for document, options in (({"a": [1] * 17_000}, {}), ({}, {"a": [{"b": 1}] * 9_000})):
        with pytest.raises(MillraceError, match="more than 16384 values") as refused:
            chat.conversation_fields(conversation(document, options))
        assert refused.value.reason is Reason.INVALID_ARGUMENT


@pytest.mark.parametrize("document", [{"a": [1] * 17_000}, nested(20)])
def test_the_same_is_refused_in_messages_before_it_is_read(document: dict[str, Any]) -> None:
    struct = struct_pb2.Struct()
    struct.update(document)
    turn = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="x")
    for name, message in (
        ("documents", chat_pb2.Conversation(messages=[turn], documents=[struct])),
        ("template_options", chat_pb2.Conversation(messages=[turn], template_options=struct)),
    ):
        with pytest.raises(MillraceError) as refused:
            chat.conversation(message, "conversation.")
        assert refused.value.field == f"conversation.{name}"
    small = struct_pb2.Struct()
    small.update({"a": [{"b": None}, "c"]})
    read = chat.conversation(chat_pb2.Conversation(messages=[turn], documents=[small]), "conversation.")
    assert read.documents == ({"a": [{"b": None}, "c"]},)
