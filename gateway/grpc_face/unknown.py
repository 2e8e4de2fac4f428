"""Fields of a request that this version's proto does not have: they would be ignored in silence."""

from __future__ import annotations

from google.protobuf import unknown_fields
from google.protobuf.message import Message

from contract.errors import unsupported
from gateway.grpc_face.shape import REMEDY


def refuse_unknown(message: Message) -> None:
    """Raises UNSUPPORTED_FIELD with the place and number of the first field that is not known."""
    known = type(message)()
    known.CopyFrom(message)
    known.DiscardUnknownFields()
    if known.ByteSize() == message.ByteSize():
        return
    field = _first(message, "")
    raise unsupported(field, REMEDY, "unknown field")


def _first(message: Message, path: str) -> str:
    for unknown in unknown_fields.UnknownFieldSet(message):  # type: ignore[attr-defined]
        return f"{path}{unknown.field_number}"
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if field.message_type.GetOptions().map_entry:
            parts = [(f"{field.name}[...]", each) for each in value.values() if isinstance(each, Message)]
        elif isinstance(value, Message):
            parts = [(field.name, value)]
        else:
            parts = [(f"{field.name}[{index}]", each) for index, each in enumerate(value)]
        for name, part in parts:
            found = _first(part, f"{path}{name}.")
            if found:
                return found
    return ""
