"""Spans as OTLP bytes, written without the protobuf library.

An attribute needs no message object to become bytes: most keys come again on span after span, so their bytes
are kept, and a span is one join of what is mostly there already. The format is
opentelemetry/proto/trace/v1/trace.proto; tests hold these bytes to what the generated classes read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.trace import TraceState

    from observability.spans import RecordedSpan

_SMALL = 1 << 12
# Numbers and flags whose bytes are kept, with their keys.
_MAX_KEPT = 8192
# Of longer texts no beginnings are kept.
_MAX_TEXT = 256

_TRACE_ID = struct.Struct(">2sQQ")
_IDS = struct.Struct(">2sQ2sQ")
_ROOT_ID = struct.Struct(">2sQ")
_TIMES = struct.Struct("<cQcQ")
_EVENT_TIME = struct.Struct("<cQ")
_LINK = struct.Struct(">2sQQ2sQ")
_DOUBLE = struct.Struct("<d")
_MASK = (1 << 64) - 1

_SPAN_ATTRIBUTE = b"\x4a"
_EVENT_ATTRIBUTE = b"\x1a"
_LINK_ATTRIBUTE = b"\x22"
# Wire type 2, and the tags of the levels of an ExportTraceServiceRequest.
_WITH_LENGTH = 2
_RESOURCE_SPANS, _SCOPE_SPANS, _SPAN = 0x0A, 0x12, 0x12


def _varint(value: int) -> bytes:
    """An unsigned number; negative ones as the 64 bits of their two's complement."""
    value &= _MASK
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


_VARINTS = tuple(map(_varint, range(_SMALL)))


def _size(value: int) -> bytes:
    return _VARINTS[value] if value < _SMALL else _varint(value)


def _field(tag: bytes, body: bytes) -> bytes:
    return tag + _size(len(body)) + body


# Attributes that are texts, whole, by key and text: most are one of few names.
_named: dict[tuple[str, Any], bytes] = {}
_MAX_NAMED = 2048
_MAX_NAME = 64
# All of an attribute but its text, by the key and the size of the text; but the eight bytes of its float.
_texts: dict[tuple[str, int], bytes] = {}
_floats: dict[str, bytes] = {}
# Apart, because 1 and True are equal.
_numbers: dict[tuple[str, int], bytes] = {}
_flags: dict[tuple[str, bool], bytes] = {}


def _pair(key: str, value: Any) -> bytes:
    """A KeyValue with its length in front, but without the tag of the field that holds it."""
    kind = type(value)
    if kind is float:
        found = _floats.get(key)
        if found is None:
            found = _floats[key] = _whole(key, b"\x21" + bytes(8))[:-8]
        return found + _DOUBLE.pack(value)
    if kind is str:
        text: bytes = value.encode(errors="replace")
        size = len(text)
        found = _texts.get((key, size))
        if found is None:
            found = _whole(key, _field(b"\x0a", text))[: -size or None]
            if size <= _MAX_TEXT and len(_texts) < _MAX_KEPT:
                _texts[key, size] = found
        return found + text
    kept: dict[Any, bytes]
    if kind is int:
        kept = _numbers
    elif kind is bool:
        kept = _flags
    else:
        return _whole(key, _any(value))
    found = kept.get((key, value))
    if found is None:
        if len(kept) >= _MAX_KEPT:
            kept.clear()
        found = kept[key, value] = _whole(key, _any(value))
    return found


def _whole(key: str, value: bytes) -> bytes:
    pair = _field(b"\x0a", key.encode()) + _field(b"\x12", value)
    return _size(len(pair)) + pair


def _any(value: Any) -> bytes:
    """An AnyValue."""
    match value:
        case str():
            return _field(b"\x0a", value.encode(errors="replace"))
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + _varint(value)
        case float():
            return b"\x21" + _DOUBLE.pack(value)
        case list() | tuple():
            return _field(b"\x2a", b"".join(_field(b"\x0a", _any(item)) for item in value))
        case _:
            return _any(str(value))


def _pairs(tag: bytes, attributes: Mapping[str, Any]) -> bytes:
    if not attributes:
        return b""
    return tag + tag.join(
        [
            _named.get(each) or _name(each) if type(each[1]) is str else _pair(*each)
            for each in attributes.items()
        ]
    )


def _name(pair: tuple[str, Any]) -> bytes:
    found = _pair(*pair)
    if len(pair[1]) <= _MAX_NAME and len(_named) < _MAX_NAMED:
        _named[pair] = found
    return found


def encode_inherited(attributes: Mapping[str, Any]) -> bytes:
    """Attributes of a span as the bytes that `encode` puts into it. Ids are new each time, and not kept."""
    return _SPAN_ATTRIBUTE + _SPAN_ATTRIBUTE.join([_pair(*each) for each in attributes.items()])


def encode_resource(resource: Mapping[str, str]) -> bytes:
    """Who makes the spans, as ResourceSpans' first field."""
    return _field(b"\x0a", _pairs(b"\x0a", resource))


def encode(spans: Iterable[bytes], resource: bytes) -> bytes:
    """An ExportTraceServiceRequest of some spans (`encode_span`) of one service (`encode_resource`)."""
    scope = _field(b"\x0a", _field(b"\x0a", b"millrace"))
    found = [scope]
    for body in spans:
        found += (b"\x12", _size(len(body)), body)
    return _field(b"\x0a", resource + _field(b"\x12", b"".join(found)))


def encode_lineage(trace_id: int, trace_state: TraceState | None) -> bytes:
    """What all spans of one trace in one service begin with."""
    found = _TRACE_ID.pack(b"\x0a\x10", trace_id >> 64, trace_id & _MASK)
    return found + _field(b"\x1a", trace_state.to_header().encode()) if trace_state else found


_names: dict[tuple[str, int], bytes] = {}


def encode_span(span: RecordedSpan) -> bytes:
    """One Span."""
    trace, identity = span.lineage.encoded
    parent_id = span.parent_id
    # Enumerations' `value` is a property written in Python.
    kind = span.kind._value_
    name = _names.get((span.name, kind))
    if name is None:
        # OTLP counts kinds from 1.
        name = _field(b"\x2a", span.name.encode()) + b"\x30" + _varint(kind + 1)
        if len(_names) < _MAX_KEPT:
            _names[span.name, kind] = name
    parts = [
        trace,
        _IDS.pack(b"\x12\x08", span.span_id, b"\x22\x08", parent_id)
        if parent_id
        else _ROOT_ID.pack(b"\x12\x08", span.span_id),
        name,
        _TIMES.pack(b"\x39", span.start_ns, b"\x41", span.end_ns),
        identity,
    ]
    if span.attributes:
        parts.append(_pairs(_SPAN_ATTRIBUTE, span.attributes))
    if span.events:
        parts.append(_events(span.events))
    if span.links:
        parts.append(_links(span.links))
    if span.status is not None:
        text = _field(b"\x12", (span.status.description or "").encode(errors="replace"))
        parts.append(_field(b"\x7a", text + b"\x18" + _varint(span.status.status_code.value)))
    return b"".join(parts)


def _events(events: Sequence[tuple[str, int, Mapping[str, Any]]]) -> bytes:
    return b"".join(
        _field(
            b"\x5a",
            _EVENT_TIME.pack(b"\x09", time_ns)
            + _field(b"\x12", name.encode())
            + _pairs(_EVENT_ATTRIBUTE, attributes),
        )
        for name, time_ns, attributes in events
    )


def _links(links: Sequence[Any]) -> bytes:
    found = []
    for link in links:
        context = link.context
        ids = _LINK.pack(
            b"\x0a\x10", context.trace_id >> 64, context.trace_id & _MASK, b"\x12\x08", context.span_id
        )
        found.append(_field(b"\x6a", ids + _pairs(_LINK_ATTRIBUTE, link.attributes or {})))
    return b"".join(found)


class MalformedOtlp(ValueError):
    """Bytes that are no ExportTraceServiceRequest."""


def count_spans(data: bytes) -> int:
    """How many spans an ExportTraceServiceRequest has, without reading them. Raises MalformedOtlp."""
    total = 0
    for start, end in _children(data, 0, len(data), _RESOURCE_SPANS):
        for inner_start, inner_end in _children(data, start, end, _SCOPE_SPANS):
            total += _count(data, inner_start, inner_end)
    return total


def _count(data: bytes, at: int, end: int) -> int:
    """How many spans a ScopeSpans has."""
    count = 0
    while at < end:
        if at + 2 < end and data[at] == _SPAN and (low := data[at + 1]) > 0x7F >= (high := data[at + 2]):
            # The length of nearly all spans: two bytes.
            at += 3 + (low & 0x7F | high << 7)
            count += 1
            continue
        tag, _, at = _next(data, at, end)
        count += tag == _SPAN
    if at > end:
        raise MalformedOtlp(f"a span ends {at - end} bytes behind what holds it")
    return count


def _children(data: bytes, at: int, end: int, wanted: int) -> Iterable[tuple[int, int]]:
    """Where the contents of each field with the tag `wanted` are."""
    while at < end:
        tag, start, at = _next(data, at, end)
        if tag == wanted:
            yield start, at


def _next(data: bytes, at: int, end: int) -> tuple[int, int, int]:
    """Tag of the field at `at`, and where its contents begin and end."""
    first = at
    tag = data[at]
    if tag & 7 != _WITH_LENGTH:
        # The levels above a span have nothing else.
        raise MalformedOtlp(f"tag {tag:#x} at byte {at}")
    while data[at] >= 0x80 and at + 1 < end:
        # The number of a field beyond the fifteenth.
        at += 1
    at += 1
    length = shift = 0
    while True:
        if at >= end:
            raise MalformedOtlp("it ends within a length")
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
        shift += 7
    if at + length > end:
        raise MalformedOtlp(f"a field of {length} bytes at byte {first} ends behind what holds it")
    return tag, at, at + length
