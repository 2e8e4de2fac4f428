"""Calls in a section, each in markers of its own, with its arguments as one JSON object: DeepSeek and Kimi.

DeepSeek V3 and R1 write `function<｜tool▁sep｜>NAME`, then the arguments in a fenced block; V3.1 writes
`NAME<｜tool▁sep｜>` and the arguments. Kimi writes the id, `functions.NAME:INDEX`, which its template needs
back.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from contract.formats import SectionForm
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.json_call import JsonValue
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

_OLD_TYPE = "function"
_FENCE = "```"
_NAME_IN_ID = re.compile(r"(?:functions\.)?(.+):\d+", re.DOTALL)


class SectionedParser(ToolCallParser):
    """White space between the answer and the calls belongs to the format."""

    def __init__(self, form: SectionForm, call_id: CallIds) -> None:
        super().__init__(call_id)
        self._form = form
        # Reads one character of a call; None outside of calls.
        self._step: Callable[[SectionedParser, str], None] | None = None
        self._in_calls = False
        # What stands before the arguments; its last characters, of which marks are made; and whether the
        # separator is in it.
        self._header: list[str] = []
        self._tail, self._is_separated = "", False
        self._ids: set[str] = set()
        # White space before the section; text behind the first marker, which becomes content when it turns
        # out to be no call.
        self._blank: list[str] = []
        self._raw: list[str] = []
        # Nothing but white space has come since the last call.
        self._is_behind_call = False
        self._value = JsonValue()

    def _read(self, text: str) -> None:
        while text:
            text = self._read_call(text) if self._step is not None else self._read_between(self._held + text)

    def _end(self) -> None:
        if self._is_cut and (self._in_calls or self._step is not None):
            if self._step is SectionedParser._before_arguments and self._has_name:
                self._begin()
        elif self._step is SectionedParser._before_arguments:
            before = [self._form.call_open] if self.num_calls else self._raw
            self._sink.content("".join(before + self._header))
        elif self._in_calls and not self.num_calls:
            self._sink.content("".join(self._raw) + self._held)
        elif self._held or not self.num_calls:
            self._sink.content("".join(self._blank) + self._held)

    def _read_between(self, text: str) -> str:
        self._held = ""
        if not self._in_calls:
            return self._before_section(text)
        form = self._form
        markers = (form.call_open, form.close, *((form.call_close, _FENCE) if self.num_calls else ()))
        before, marker, rest = split_at_marker(text, markers)
        if self.num_calls:
            self._say(before)
        else:
            self._raw.append(before + (marker or ""))
        if marker is None:
            self._held = rest
        elif marker == _FENCE:
            # It closes the one around the arguments; any other is text.
            self._say("" if self._is_behind_call else marker)
        elif marker == form.close:
            self._in_calls = False
            self._sink.content("" if self.num_calls else "".join(self._raw))
            self._blank = []
        elif marker == form.call_open:
            self._header, self._tail, self._is_separated = [], "", False
            self._step, self._blank = SectionedParser._before_arguments, []
        return rest if marker else ""

    def _before_section(self, text: str) -> str:
        before, marker, rest = split_at_marker(text, (self._form.open,))
        self._say(before)
        if marker is None:
            self._held = rest
            return ""
        self._in_calls, self._raw, self._blank = True, [*self._blank, marker], []
        return rest

    def _say(self, text: str) -> None:
        """Text without the white space behind it, and behind a call without that before it."""
        certain = text.rstrip()
        if certain:
            said = "".join(self._blank) + certain
            self._sink.content(said.lstrip() if self._is_behind_call else said)
            self._blank, self._is_behind_call = [], False
        self._blank.append(text[len(certain) :])

    def _read_call(self, text: str) -> str:
        for position, character in enumerate(text):
            assert self._step is not None, "a call is open here"
            self._step(self, character)
            if self._step is None:
                return text[position + 1 :]
        return ""

    def _before_arguments(self, character: str) -> None:
        if character != "{" or not self._is_separated:
            self._header.append(character)
            form = self._form
            self._tail = (self._tail + character)[-max(len(form.separator), len(form.call_close)) :]
            self._is_separated = self._is_separated or self._tail.endswith(form.separator)
            if self._tail.endswith(form.call_close):
                self._end_without_object("".join(self._header))
            return
        self._begin()
        self._value = JsonValue()
        self._step = SectionedParser._in_arguments
        self._in_arguments(character)

    def _end_without_object(self, header: str) -> None:
        """A call whose arguments are no object: one of nothing, or text."""
        name = self._name()
        written = header.removesuffix(self._form.call_close).partition(self._form.separator)[2].strip()
        written = written.removeprefix(name).strip().removeprefix("```json").removesuffix("```")
        self._step = None
        if self._is_separated and name and not written.strip():
            self._begin()
            self._sink.argue("{}")
            self.num_complete += 1
            self._is_behind_call = True
        elif self.num_calls:
            self._sink.content(self._form.call_open + header)
        else:
            self._raw.append(header)

    def _begin(self) -> None:
        written = self._name()
        if not self._form.has_ids:
            self._sink.begin(written)
            return
        found = _NAME_IN_ID.fullmatch(written)
        name, call_id, index = found[1] if found else written, written, self.num_calls
        # An id that came before in this answer would be two calls' own.
        while call_id in self._ids or not _NAME_IN_ID.fullmatch(call_id):
            call_id, index = f"functions.{name}:{index}", index + 1
        self._ids.add(call_id)
        self._sink.begin(name, call_id)

    @property
    def _has_name(self) -> bool:
        """Whether the name in the header is whole."""
        kind, _, rest = "".join(self._header).partition(self._form.separator)
        return self._is_separated and (kind.strip() != _OLD_TYPE or "\n" in rest)

    def _name(self) -> str:
        """What the header calls."""
        header = "".join(self._header).removesuffix(self._form.call_close)
        kind, _, rest = header.partition(self._form.separator)
        # A tool of the new format may itself be called "function"; then nothing stands after the separator.
        is_old = kind.strip() == _OLD_TYPE and rest.strip()
        return (rest.partition("\n")[0] if is_old else kind).strip()

    def _in_arguments(self, character: str) -> None:
        _, ended = self._value.feed(character)
        self._sink.argue(character)
        if ended:
            self.num_complete += 1
            self._step, self._is_behind_call = None, True
