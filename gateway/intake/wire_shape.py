"""Counts what a large message holds before it is parsed, as `json_shape.py` does with JSON."""

from __future__ import annotations

from collections.abc import Iterator

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from contract.errors import MillraceError, Reason, invalid
from gateway.config import RequestConfig

# Fields that are counted between two breaths, in about a millisecond.
_IN_ONE_SLICE = 1024
_BYTES, _GROUP, _GROUP_ENDS = 2, 3, 4
# The last byte of every number is below it.
_CONTINUED = bytes(range(128, 256))
# The name under which fields without a known name are counted.
_UNKNOWN = "the request"
# Parts of a name that an error shows: "conversation.messages".
_MAX_PARTS = 2


class _Reader:
    """Reads the bytes of a message from an offset on."""

    __slots__ = ("data", "offset")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def number(self) -> int:
        """A varint; raises IndexError where the bytes end before it."""
        data, offset, value, shift = self.data, self.offset, 0, 0
        while (byte := data[offset]) >= 128:
            value |= (byte & 127) << shift
            shift += 7
            offset += 1
            if shift > 63:
                raise IndexError
        self.offset = offset + 1
        return value | byte << shift

    def skip(self, wire: int) -> int:
        """Passes a value; where it would end, for one of a length."""
        match wire:
            case 0:
                self.number()
                return self.offset
            case 1:
                self.offset += 8
            case 5:
                self.offset += 4
            case 2:
                length = self.number()
                return self.offset + length
            case 3:
                return self.offset
            case _:
                raise IndexError
        return self.offset


def counted(data: bytes, kind: Descriptor, limits: RequestConfig) -> Iterator[None]:
    """Yields now and then while it counts. Raises INVALID_ARGUMENT with the field that holds too much, and
    MALFORMED_BODY.
    """
    reader = _Reader(data)
    # Messages inside each other: what they are, where they end, and the name of the field that holds them.
    # A group, which only fields that nobody knows can be, is the number of its field, and ends with a tag.
    inside: list[tuple[Descriptor | int, int, str]] = [(kind, len(data), "")]
    counts: dict[str, int] = {}
    num_fields = 0
    try:
        while inside:
            message, end, path = inside[-1]
            if _ends_here(reader, message, end):
                inside.pop()
                continue
            tag = reader.number()
            wire = tag & 7
            field = None
            if wire != _GROUP and not isinstance(message, int):
                field = message.fields_by_number.get(tag >> 3)
            ends = reader.skip(wire)
            if ends > end:
                raise IndexError
            name = path
            if field is None:
                # Protobuf keeps the bytes of fields that another version has, though nobody reads them.
                _add(counts, _UNKNOWN, 1, limits.max_values, "fields that this version does not know")
            else:
                name = _named(path, field, len(inside))
                packed = data[reader.offset : ends] if _is_packed(field, tag) else None
                _count(counts, name, field, packed, limits)
            within = _within(field, tag)
            if within is not None:
                inside.append((within, end if wire == _GROUP else ends, name))
                if len(inside) > limits.max_depth:
                    raise invalid(
                        name or _UNKNOWN, f"nested more than {limits.max_depth} levels deep; nest less"
                    )
            else:
                reader.offset = ends
            num_fields += 1
            if num_fields % _IN_ONE_SLICE == 0:
                yield
    except IndexError as error:
        raise _malformed(kind) from error


def not_parsed(data: bytes, kind: Descriptor) -> MillraceError:
    """Why the bytes of a message that was counted cannot be parsed: INVALID_ARGUMENT at a text that is no
    UTF-8, else MALFORMED_BODY.
    """
    field = _no_text(_Reader(data), len(data), kind)
    if not field:
        return _malformed(kind)
    return invalid(field, "its bytes are no UTF-8; half of a surrogate pair has no form in it: leave it out")


def _malformed(kind: Descriptor) -> MillraceError:
    problem = f"the bytes of the request are no {kind.full_name}; generate the client from proto/"
    return MillraceError(Reason.MALFORMED_BODY, problem)


def _no_text(reader: _Reader, end: int, kind: Descriptor, path: str = "") -> str:
    """The first text that is no UTF-8, such as "conversation.messages[1].content"; "" for none."""
    counts: dict[int, int] = {}
    while reader.offset < end:
        tag = reader.number()
        if tag & 7 == _GROUP_ENDS:
            continue
        ends, field = reader.skip(tag & 7), kind.fields_by_number.get(tag >> 3)
        if field is not None and tag & 7 == _BYTES:
            at = counts[tag >> 3] = counts.get(tag >> 3, -1) + 1
            name = f"{path}{field.name}[{at}]" if field.default_value == [] else f"{path}{field.name}"
            inside = field.message_type
            found = "" if inside is None else _no_text(reader, ends, inside, f"{name}.")
            if found:
                return found
            if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(reader.data[reader.offset : ends]):
                return name
        reader.offset = ends
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _ends_here(reader: _Reader, message: Descriptor | int, end: int) -> bool:
    """Whether a message ends here; passes the tag that ends a group. IndexError where one may not end."""
    if reader.offset < end:
        if reader.data[reader.offset] & 7 != _GROUP_ENDS:
            return False
        if reader.number() >> 3 != message:
            raise IndexError
    elif reader.offset > end or isinstance(message, int):
        raise IndexError
    return True


def _within(field: FieldDescriptor | None, tag: int) -> Descriptor | int | None:
    """What is counted inside a field: a message's kind, a group's number; None where nothing is."""
    if tag & 7 == _GROUP:
        return tag >> 3
    if field is not None and tag & 7 == _BYTES:
        return field.message_type
    return None


def _named(path: str, field: FieldDescriptor, depth: int) -> str:
    if depth > _MAX_PARTS:
        return path
    return f"{path}.{field.name}" if path else str(field.name)


def _is_packed(field: FieldDescriptor, tag: int) -> bool:
    return tag & 7 == _BYTES and field.cpp_type in (
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    )


def _count(
    counts: dict[str, int], name: str, field: FieldDescriptor, packed: bytes | None, limits: RequestConfig
) -> None:
    num_values = 1 if packed is None else len(packed.translate(None, _CONTINUED))
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32:
        _add(counts, name, num_values, limits.max_token_ids, "token ids")
    else:
        _add(counts, name, num_values, limits.max_values, "values")


def _add(counts: dict[str, int], name: str, num_values: int, limit: int, what: str) -> None:
    counts[name] = counts.get(name, 0) + num_values
    if counts[name] > limit:
        raise invalid(name, f"more than {limit} {what}; send fewer in one request")
