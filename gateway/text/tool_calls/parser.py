"""What the parsers of all formats have in common: where calls go, and how text comes."""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.delta import TextDelta, ToolCallDelta
from gateway.text.markers import split_at_marker

# Makes the id of the call with this index.
CallIds = Callable[[int], str]


class CallSink:
    """Writes content and pieces of calls into the current delta, and numbers the calls."""

    def __init__(self, call_id: CallIds) -> None:
        self.num_begun = 0
        self.delta = TextDelta()
        # Name and pieces of the arguments of each call, for whoever counts the valid ones.
        self.calls: list[tuple[str, list[str]]] = []
        self._call_id = call_id

    def begin(self, name: str, call_id: str = "") -> None:
        """A call's name is known, and the id where the model writes one that its template needs."""
        index = self.num_begun
        self.num_begun += 1
        self.calls.append((name, []))
        self.delta.add_call(ToolCallDelta(index=index, id=call_id or self._call_id(index), name=name))

    def argue(self, piece: str) -> None:
        """A piece of the arguments of the call that began last."""
        self.calls[-1][1].append(piece)
        self.delta.add_call(ToolCallDelta(index=self.num_begun - 1, arguments=piece))

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        self.delta.content += text


class ToolCallParser:
    """A TextParser that takes calls out of the text; what never became a call is content."""

    def __init__(self, call_id: CallIds) -> None:
        # Calls completed so far.
        self.num_complete = 0
        # A call that is read keeps this: methods of the parser's own would be a cycle.
        self._sink = CallSink(call_id)
        # Text that may yet become a marker, or that belongs to the format if a call follows.
        self._held = ""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._sink.num_begun

    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each, as far as it has come."""
        return [(name, "".join(pieces)) for name, pieces in self._sink.calls]

    def feed(self, text: str, delta: TextDelta) -> None:
        """Adds content and pieces of calls that are certain."""
        self._sink.delta = delta
        self._read(text)

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back."""
        self._sink.delta = delta
        self._end()
        self._held = ""

    def _read(self, text: str) -> None:
        raise NotImplementedError

    def _content_up_to(self, text: str, opens: str) -> str | None:
        """Passes on what stands before the mark `opens`, without the line breaks in front of it. Returns what
        follows it; None where it has not come, and the rest is held.
        """
        before, marker, rest = split_at_marker(text, (opens,))
        certain = before.rstrip("\n")
        self._sink.content(certain)
        self._held = before[len(certain) :] + ("" if marker else rest)
        return rest if marker else None

    def _end_of_content(self) -> None:
        """Line breaks after calls belong to the format."""
        self._sink.content(self._held if self._held.strip("\n") or not self.num_calls else "")

    def _end(self) -> None:
        raise NotImplementedError
