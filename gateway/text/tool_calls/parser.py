"""What the parsers of all formats have in common: where calls go, and how text comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.text.delta import TextDelta, ToolCallDelta
from gateway.text.markers import split_at_marker

# Characters of a text that are read at once.
AT_ONCE = 1024
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
        # Pieces of the arguments that are not in the delta yet: they come character by character.
        self._pending: list[str] = []

    def begin(self, name: str, call_id: str = "") -> None:
        """A call's name is known, and the id where the model writes one that its template needs."""
        self.flush()
        index = self.num_begun
        self.num_begun += 1
        self.calls.append((name, []))
        self.delta.add(ToolCallDelta(index=index, id=call_id or self._call_id(index), name=name))

    def argue(self, piece: str) -> None:
        """A piece of the arguments of the call that began last."""
        self._pending.append(piece)

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        self.flush()
        self.delta.say(text)

    def flush(self) -> None:
        """Puts into the delta what has come of the arguments."""
        if self._pending:
            text = "".join(self._pending)
            self._pending.clear()
            if text:
                self.calls[-1][1].append(text)
                self.delta.add(ToolCallDelta(index=self.num_begun - 1, arguments=text))


class ToolCallParser:
    """A TextParser that takes calls out of the text; what never became a call is content.

    Its work is linear in the text, however that is cut: what it looks at again is shorter than a mark, and of
    a long text it takes a part at a time.
    """

    def __init__(self, call_id: CallIds) -> None:
        # Calls completed so far.
        self.num_complete = 0
        # A call that is read keeps this: methods of the parser's own would be a cycle.
        self._sink = CallSink(call_id)
        # Text that may yet become a marker.
        self._held = ""
        # Line breaks before it, which belong to the format if a call follows.
        self._num_breaks = 0
        # The end that comes is none that the model has written.
        self._is_cut = False

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        return self._sink.num_begun

    def calls(self) -> list[tuple[str, str]]:
        """(name, arguments) of each, as far as it has come."""
        return [(name, "".join(pieces)) for name, pieces in self._sink.calls]

    def cut(self) -> None:
        """To be called before `finish` where something else than the model has ended the answer."""
        self._is_cut = True

    def feed(self, text: str, delta: TextDelta) -> None:
        """Adds content and pieces of calls that are certain."""
        self._sink.delta = delta
        for start in range(0, len(text), AT_ONCE):
            self._read(text[start : start + AT_ONCE])
        self._sink.flush()

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back. Of a call that was cut behind its opening mark nothing is content: it is
        there with as much of it as has come, or not at all where its name was not whole.
        """
        self._sink.delta = delta
        self._end()
        self._sink.flush()
        self._held = ""

    def _read(self, text: str) -> None:
        raise NotImplementedError

    def _content_up_to(self, text: str, marks: Sequence[str]) -> tuple[str | None, str]:
        """Passes on what stands before the first of the marks, without the line breaks in front of it.
        Returns the mark and what follows it; (None, "") where none has come, and what may become one is held.
        """
        before, mark, rest = split_at_marker(text, marks)
        certain = before.rstrip("\n")
        if certain:
            self._sink.content(self._take_breaks() + certain)
        self._num_breaks += len(before) - len(certain)
        self._held = "" if mark else rest
        return mark, rest if mark else ""

    def _take_breaks(self) -> str:
        """The line breaks that turned out to be text."""
        breaks, self._num_breaks = "\n" * self._num_breaks, 0
        return breaks

    def _end_of_content(self) -> None:
        """Line breaks after calls belong to the format."""
        if self._held or not self.num_calls:
            self._sink.content(self._take_breaks() + self._held)

    def _end(self) -> None:
        raise NotImplementedError
