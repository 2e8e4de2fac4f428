"""Counts what a large body holds before it is parsed.

A parser makes objects of everything that a client has sent before anybody can see that it is too much, and
nothing else goes on meanwhile. Counting needs no objects: texts are left out, and in what remains a comma or
an opening bracket stands for a value.
"""

from __future__ import annotations

from collections.abc import Set
from itertools import accumulate

from contract.errors import MillraceError, Reason, invalid
from gateway.config import RequestConfig
from gateway.types.request import MAX_METADATA

# Bytes that are counted at a time: at worst two milliseconds of work.
SLICE_BYTES = 8 * 1024
_NOT_BRACKETS = bytes(each for each in range(256) if each not in b"[]{}")
# Change of the depth at each bracket, as a signed byte.
_AS_STEPS = bytes.maketrans(b"[]{}", b"\x01\xff\x01\xff")
# Characters of a name that an error shows.
_MAX_NAME = 64
# A body has some eighty fields.
_MAX_FIELDS = 1024
# Fields that hold token ids.
ID_FIELDS = frozenset({"prompt", "tokens", "allowed_token_ids", "stop_token_ids"})
# Those of bodies that are embedded: their input is no conversation.
EMBEDDED_ID_FIELDS = frozenset({"input"})


class BodyShape:
    """Counts the values of JSON that comes in slices. What is no JSON is left to the parser."""

    def __init__(self, limits: RequestConfig, id_fields: Set[str] = ID_FIELDS) -> None:
        self._limits = limits
        self._id_fields = id_fields
        # Backslashes that ended the slice before: they may belong to what follows.
        self._rest = b""
        self._in_text = False
        self._depth = 0
        # The field of the body that is read, and how many values of it have come.
        self._field = ""
        self._num_values = 0
        self._num_fields = 0
        # A text in the body itself, which is a field's name if a colon follows.
        self._name = b""

    def feed(self, data: bytes) -> None:
        """Raises INVALID_ARGUMENT with the field that holds too much, MALFORMED_BODY for too deep nesting."""
        data = self._rest + data
        kept = len(data.rstrip(b"\\"))
        kept += (len(data) - kept) // 2 * 2
        data, self._rest = data[:kept], data[kept:]
        # Without escapes every quote begins a text or ends one.
        if b"\\" in data:
            data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = data.split(b'"')
        structure = b"".join(parts[self._in_text :: 2])
        steps = memoryview(structure.translate(_AS_STEPS, _NOT_BRACKETS)).cast("b")
        depths = list(accumulate(steps, initial=self._depth))
        if max(depths) > self._limits.max_depth:
            self._by_parts(parts)
            raise self._too_deep()
        if min(depths) > 1:
            # All of it is the same field's.
            self._in_text ^= len(parts) % 2 == 0
            self._depth = depths[-1]
            self._count(structure)
        else:
            self._by_parts(parts)

    def _by_parts(self, parts: list[bytes]) -> None:
        for index, part in enumerate(parts):
            if index:
                self._in_text = not self._in_text
            if self._in_text:
                if self._depth == 1:
                    self._name = ((b"" if index else self._name) + part)[:_MAX_NAME]
            elif part:
                if self._depth == 1 and part.lstrip()[:1] == b":":
                    self._begin_field()
                self._depth += sum(memoryview(part.translate(_AS_STEPS, _NOT_BRACKETS)).cast("b"))
                self._count(part)

    def _begin_field(self) -> None:
        self._field, self._num_values = self._name.decode("utf-8", "replace"), 0
        self._num_fields += 1
        if self._num_fields > _MAX_FIELDS:
            raise invalid("the body", f"more than {_MAX_FIELDS} fields; name each once")

    def _count(self, structure: bytes) -> None:
        self._num_values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        self._check_values()

    def _check_values(self) -> None:
        limits, field = self._limits, self._field
        has_ids = field in self._id_fields
        limit = limits.max_token_ids if has_ids else limits.max_values
        if self._num_values > limit:
            what = "token ids" if has_ids else "values"
            raise invalid(field or "the body", f"more than {limit} {what}; {self._remedy(field)}")

    def _remedy(self, field: str) -> str:
        limits = self._limits
        if field in self._id_fields:
            return "send fewer in one request"
        match field:
            case "documents" | "text_1" | "text_2":
                return f"a request has at most {limits.max_inputs} texts"
            case "messages" | "system" | "input":
                few = f"{limits.max_messages} messages, {limits.max_parts} parts"
                return f"a request has at most {few} and {limits.max_tool_calls} tool calls"
            case "tools":
                return f"a request has at most {limits.max_tools} tools; give them smaller schemas"
            case "metadata":
                return f"a request has at most {MAX_METADATA} entries"
            case _:
                return "send fewer in one request"

    def _too_deep(self) -> MillraceError:
        limit = self._limits.max_depth
        return MillraceError(
            Reason.MALFORMED_BODY,
            f"{self._field or 'the body'}: nested more than {limit} levels deep; nest less",
            field=self._field,
        )
