"""Reads google.rpc.Status with the three details that Millrace sends, without googleapis-common-protos.

The messages are declared in a pool of their own, so that a process that has that package as well sees no file
twice. Fields and numbers are those of google/rpc/status.proto and google/rpc/error_details.proto.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, duration_pb2, message_factory
from google.protobuf.message import DecodeError

# In trailing metadata.
DETAILS_KEY = "grpc-status-details-bin"
_FIELD = descriptor_pb2.FieldDescriptorProto
_DOMAIN = "millrace"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusDetails:
    """What a status says beside its code and message; all of it empty where the status has no details."""

    reason: str = ""
    field: str = ""
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)
    retry_after_s: float | None = None


def read_details(status: bytes) -> StatusDetails:
    """The details of a serialized google.rpc.Status; what cannot be read says nothing."""
    found: dict[str, Any] = {}
    try:
        packed = _CLASSES["Status"].FromString(status).details
        for each in packed:
            _read(each.type_url.rpartition("/")[2], each.value, found)
    except DecodeError:
        return StatusDetails()
    return StatusDetails(**found)


def _read(name: str, value: bytes, found: dict[str, Any]) -> None:
    if name == "google.rpc.ErrorInfo":
        info = _CLASSES["ErrorInfo"].FromString(value)
        if info.domain == _DOMAIN:
            found |= {"reason": info.reason, "metadata": {each.key: each.value for each in info.metadata}}
    elif name == "google.rpc.BadRequest":
        violations = _CLASSES["BadRequest"].FromString(value).field_violations
        found["field"] = violations[0].field if violations else ""
    elif name == "google.rpc.RetryInfo":
        delay = _CLASSES["RetryInfo"].FromString(value).retry_delay
        found["retry_after_s"] = delay.seconds + delay.nanos / 1e9


def _declared() -> dict[str, Any]:
    """The classes, by their names."""
    text = _FIELD.TYPE_STRING
    messages: dict[str, tuple[tuple[str, int, int, str], ...]] = {
        "Status": (("code", 1, _FIELD.TYPE_INT32, ""), ("details", 3, 0, "google.protobuf.Any")),
        # On the wire a map is repeated entries.
        "Entry": (("key", 1, text, ""), ("value", 2, text, "")),
        "ErrorInfo": (
            ("reason", 1, text, ""),
            ("domain", 2, text, ""),
            ("metadata", 3, 0, "google.rpc.Entry"),
        ),
        "FieldViolation": (("field", 1, text, ""),),
        "BadRequest": (("field_violations", 1, 0, "google.rpc.FieldViolation"),),
        "RetryInfo": (("retry_delay", 1, _FIELD.TYPE_MESSAGE, "google.protobuf.Duration"),),
    }
    file = descriptor_pb2.FileDescriptorProto(
        name="millrace_client/details.proto", package="google.rpc", syntax="proto3"
    )
    file.dependency.extend([any_pb2.DESCRIPTOR.name, duration_pb2.DESCRIPTOR.name])
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind, type_name in fields:
            label = _FIELD.LABEL_OPTIONAL if kind else _FIELD.LABEL_REPEATED
            made = message.field.add(name=field_name, number=number, label=label)
            made.type = kind or _FIELD.TYPE_MESSAGE  # type: ignore[assignment]
            if type_name:
                made.type_name = f".{type_name}"
    pool = descriptor_pool.DescriptorPool()
    for known in (any_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"google.rpc.{name}"))
        for name in messages
    }


_CLASSES = _declared()
