"""Requests made of plain values. An option is named as its field in the protos, wherever that is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2

# A text, messages of the protos, or mappings with their fields, whose role may be written "user".
ChatInput = str | Sequence[chat_pb2.Message | Mapping[str, Any]]
# A text, or token ids.
TextInput = str | Sequence[int]
_Made = TypeVar("_Made", bound=Message)
# Fields of a request whose own fields are options, too.
_OPENED = ("sampling", "conversation", "options")


def with_options(request: _Made, options: Mapping[str, Any]) -> _Made:
    """Sets fields of the request, or of its sampling, conversation or options.

    Raises ValueError that names an option which there is not, or whose value is of another kind.
    """
    places = [
        request,
        *(getattr(request, name) for name in _OPENED if name in request.DESCRIPTOR.fields_by_name),
    ]
    for name, value in options.items():
        place = next((each for each in places if name in each.DESCRIPTOR.fields_by_name), None)
        if place is None:
            known = sorted({field for each in places for field in each.DESCRIPTOR.fields_by_name})
            raise ValueError(f"{name}: no such option; there are {', '.join(known)}")
        try:
            # Not assigned: lists and nested messages cannot be, and a mapping may stand for a message.
            place.MergeFrom(type(place)(**{name: value}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {value!r} is not of its kind ({error})") from error
    return request


def conversation_of(messages: ChatInput) -> chat_pb2.Conversation:
    """A conversation; raises ValueError that names the message at fault."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    made = chat_pb2.Conversation()
    for index, message in enumerate(messages):
        if isinstance(message, chat_pb2.Message):
            made.messages.append(message)
            continue
        fields = dict(message)
        role = fields.pop("role", "user")
        try:
            number = chat_pb2.Role.Value(f"ROLE_{role.upper()}") if isinstance(role, str) else role
            made.messages.append(chat_pb2.Message(role=number, **fields))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"messages[{index}]: expected role (system, user, assistant, tool or developer), content and "
                f"other fields of millrace.common.v1.Message ({error})"
            ) from error
    return made


def pooled_inputs(inputs: TextInput | Iterable[TextInput]) -> list[inference_pb2.PooledInput]:
    """One input for each text or list of token ids; a text alone, or ids alone, are one."""
    if isinstance(inputs, str):
        inputs = [inputs]
    listed: list[Any] = list(inputs)
    if listed and all(isinstance(each, int) for each in listed):
        listed = [listed]
    return [
        inference_pb2.PooledInput(text=each)
        if isinstance(each, str)
        else inference_pb2.PooledInput(token_ids=inference_pb2.TokenIds(ids=each))
        for each in listed
    ]
