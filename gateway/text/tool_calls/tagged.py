"""Calls whose arguments stand one by one between marks (Qwen's XML, GLM, MiniMax, DeepSeek from V3.2 on).

Every argument becomes JSON of its schema's type; one that can only be a text is passed on as it comes. A
value ends at its closing mark where the next argument, or the call's end, follows: other closing marks are
its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from contract.formats import TaggedForm
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.parser import CallIds, ToolCallParser
from gateway.text.tool_calls.values import ToolTypes, is_text, typed_value

_SPACE = " \t\r\n"
_NAME = re.compile(r"[^\s<>\"{}]+")
# Characters of a name, with the spaces around it.
_MAX_NAME = 256


class TaggedParser(ToolCallParser):
    """A call is one from its first argument or its end on; what never gets there is content."""

    def __init__(self, form: TaggedForm, call_id: CallIds, tools: ToolTypes) -> None:
        super().__init__(call_id)
        self._form = form
        self._tools = tools
        # How a call of a tool of the request begins where the model has left out the mark before it, as
        # Qwen3-Coder does at times. Grammars lead calls from that mark on, so no strict tools are here.
        bare = tools.not_strict if form.call_open and form.name_close == ">" else ()
        self._bare = {f"{form.call_open}{name}{form.name_close}": name for name in bare}
        # Takes some of the text and returns the rest.
        self._step: Callable[[TaggedParser, str], str] = TaggedParser._content
        # What was read of the format since the last call, white space behind it, and a part of it that is
        # read, of which only the end is looked at.
        self._raw = ""
        self._blank: list[str] = []
        self._written: list[str] = []
        self._name = ""
        self._announced = False
        self._num_arguments = 0
        # Text between the arguments of a call, which is shown behind it.
        self._strays: list[str] = []
        # What may follow an argument.
        ends = (form.key_open, form.call_close or form.close, form.close)
        self._after_value = tuple(dict.fromkeys(ends))
        self._kinds: frozenset[str] = frozenset()
        self._at_start = False
        self._back = ""
        self._value: list[str] = []

    def _read(self, text: str) -> None:
        rest = self._held + text
        self._held = ""
        while rest:
            rest = self._step(self, rest)

    def _end(self) -> None:
        is_behind_value = self._step is TaggedParser._arguments
        if self._announced:
            self._strays.append(self._held if is_behind_value and not self._is_cut else "")
            self._show_strays()
        elif self._step is TaggedParser._content:
            self._end_of_content()
        elif self._is_cut:
            if is_behind_value:
                # The name is whole, and no argument has come.
                self._sink.begin(self._name)
        elif self._raw or self._held:
            self._sink.content(self._raw + self._take_blank() + self._held)

    def _wait(self, text: str) -> str:
        self._held = text
        return ""

    def _next(self, text: str, marks: Sequence[str]) -> tuple[str | None, str]:
        """(the mark that `text` begins with after white space, the rest); ("", …) where it is another text,
        and (None, …) where that is not known yet. The white space is kept until it is taken.
        """
        rest = text.lstrip(_SPACE)
        self._blank.append(text[: len(text) - len(rest)])
        for mark in marks:
            if rest.startswith(mark):
                return mark, rest[len(mark) :]
        return (None if any(mark.startswith(rest) for mark in marks) else ""), rest

    def _take_blank(self) -> str:
        blank = "".join(self._blank)
        self._blank.clear()
        return blank

    def _content(self, text: str) -> str:
        mark, rest = self._content_up_to(text, (self._form.open, *self._bare))
        if mark in self._bare:
            self._raw = self._take_breaks() + mark
            self._begin_arguments(self._bare[mark])
        elif mark is not None:
            self._raw = self._take_breaks() + mark
            self._step = TaggedParser._between if self._form.call_open else TaggedParser._in_name
        return rest

    def _no_call(self, text: str) -> str:
        self._sink.content(self._raw)
        self._raw = ""
        self._step = TaggedParser._content
        return text

    def _between(self, text: str) -> str:
        form = self._form
        mark, rest = self._next(text, (form.call_open, form.close))
        if mark is None:
            return self._wait(rest)
        blank = self._take_blank()
        if mark == form.call_open:
            self._raw += blank + mark
            self._step = TaggedParser._in_name
            return rest
        if self._raw:
            # No call has come in this section, or not since something else.
            return self._no_call(blank + mark + rest)
        self._step = TaggedParser._content
        return rest if mark else blank + rest

    def _in_name(self, text: str) -> str:
        form = self._form
        ends = () if form.call_open else (form.key_open, form.close)
        written, mark, rest = split_at_marker(text, (form.name_close, *ends) if form.name_close else ends)
        name = written.strip(_SPACE if ends else " ")
        if ((mark or name) and not _NAME.fullmatch(name)) or len(written) > _MAX_NAME:
            return self._no_call(text)
        if mark is None:
            return self._wait(text)
        self._begin_arguments(name)
        if mark != form.name_close:
            self._raw += written
            return mark + rest
        self._raw += written + mark
        return rest

    def _begin_arguments(self, name: str) -> None:
        self._name = name
        self._announced, self._num_arguments = False, 0
        self._step = TaggedParser._arguments

    def _arguments(self, text: str) -> str:
        form = self._form
        mark, rest = self._next(text, self._after_value)
        if mark is None:
            return self._wait(rest)
        blank = self._take_blank()
        if mark:
            if not self._announced:
                self._announced, self._raw = True, ""
                self._sink.begin(self._name)
            if mark == form.key_open:
                self._step = TaggedParser._in_key
                return rest
            self._sink.argue("}" if self._num_arguments else "{}")
            self.num_complete += 1
            self._announced = False
            self._show_strays()
            in_section = form.call_close and mark == form.call_close
            self._step = TaggedParser._between if in_section else TaggedParser._content
            return rest
        if not self._announced:
            return self._no_call(blank + rest)
        # The name is out already.
        stray, found, rest = split_at_marker(rest, self._after_value)
        self._strays.append(blank + stray)
        return found + rest if found else self._wait(rest)

    def _show_strays(self) -> None:
        text = "".join(self._strays)
        self._strays.clear()
        self._sink.content(text if text.strip() else "")

    def _in_key(self, text: str) -> str:
        form = self._form
        before, mark, rest = split_at_marker(text, (form.key_close,))
        self._written.append(before)
        if mark is None:
            return self._wait(rest)
        written = "".join(self._written)
        self._written.clear()
        key, _, kind = written.partition(form.kind) if form.kind else (written, "", "")
        self._kinds = frozenset({"string"}) if kind == "true" else self._tools.kinds(self._name, key)
        self._sink.argue(
            ("{" if not self._num_arguments else ", ") + json.dumps(key, ensure_ascii=False) + ": "
        )
        self._num_arguments += 1
        self._step = TaggedParser._before_value if form.value_open else TaggedParser._begin_value
        return rest if form.value_open else self._begin_value(rest)

    def _before_value(self, text: str) -> str:
        mark, rest = self._next(text, (self._form.value_open,))
        if mark is None:
            return self._wait(rest)
        blank = self._take_blank()
        return self._begin_value(rest if mark else blank + rest)

    def _begin_value(self, text: str) -> str:
        self._at_start, self._back, self._value = True, "", []
        if is_text(self._kinds):
            self._sink.argue('"')
        self._step = TaggedParser._in_value
        return text

    def _in_value(self, text: str) -> str:
        before, mark, rest = split_at_marker(text, (self._form.value_close,))
        self._pass(before)
        if mark is None:
            return self._wait(rest)
        self._step = TaggedParser._behind_value
        return rest

    def _behind_value(self, text: str) -> str:
        """Behind a closing mark, which is the value's own text unless what follows a value follows it."""
        follows, rest = self._next(text, self._after_value)
        if follows is None:
            return self._wait(rest)
        blank = self._take_blank()
        if not follows:
            self._pass(self._form.value_close)
            self._step = TaggedParser._in_value
            return blank + rest
        if is_text(self._kinds):
            self._sink.argue('"')
        else:
            value = "".join(self._value)
            self._sink.argue(typed_value(value.removesuffix(self._form.pad), self._kinds))
        self._step = TaggedParser._arguments
        return follows + rest

    def _pass(self, text: str) -> None:
        """A piece of the value."""
        pad = self._form.pad
        if self._at_start and text:
            self._at_start, text = False, text.removeprefix(pad)
        if not is_text(self._kinds):
            self._value.append(text)
            return
        text, self._back = self._back + text, ""
        if pad and text.endswith(pad):
            text, self._back = text[: -len(pad)], pad
        if text:
            self._sink.argue(json.dumps(text, ensure_ascii=False)[1:-1])
