"""Calls that can only be read when they are whole: Llama 4's list of Python calls, Gemma's braces."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from contract.formats import BracedForm
from gateway.text.markers import split_at_marker
from gateway.text.tool_calls.parser import CallIds, ToolCallParser
from gateway.text.tool_calls.values import ToolTypes

_SPACE = " \t\r\n"
_NAME = re.compile(r"[\w.-]+")
_MAX_NAME = 256
PYTHON_OPEN, PYTHON_CLOSE = "<|python_start|>", "<|python_end|>"
_NAMES_IN_JSON = {"true": True, "false": False, "null": None}
_UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)


class PythonCall:
    """Reads one call `f(a=1)` character by character, from behind its opening bracket on."""

    def __init__(self, source: str) -> None:
        self._source = [source]
        # Open brackets, and the quote of the text that is read.
        self._depth, self._quote, self._escaped = 1, "", False

    @property
    def source(self) -> str:
        """What was read."""
        return "".join(self._source)

    @property
    def name(self) -> str:
        """What is called."""
        return self.source.partition("(")[0].removesuffix(".call")

    def feed(self, character: str) -> bool:
        """Whether the call has ended."""
        self._source.append(character)
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "'\"":
            self._quote = character
        else:
            self._depth += (character in "([{") - (character in ")]}")
        return not self._depth

    def read(self, tools: ToolTypes) -> tuple[str, str] | None:
        """(name, arguments as JSON); None where it is no call with named arguments."""
        rest = self.source.partition("(")[2]
        try:
            call = ast.parse(f"f({rest}", mode="eval").body
            if not isinstance(call, ast.Call) or call.args:
                return None
            arguments = {str(each.arg): _python_value(each.value) for each in call.keywords if each.arg}
            return self.name, tools.written(self.name, arguments)
        except _UNREADABLE:
            return None


class MayBeCalls(ToolCallParser):
    """An answer that begins with calls, or content from where it turns out not to. In content a call begins
    where it spells all of `behind_text` around the name of a tool of the request. Grammars lead no calls
    behind text, so strict tools are called at the beginning alone.
    """

    # How a call behind text begins, around the tool's name.
    behind_text = ("", "")

    def __init__(self, call_id: CallIds, tools: ToolTypes) -> None:
        super().__init__(call_id)
        self._tools = tools
        before, after = self.behind_text
        self._begins = {f"{before}{name}{after}": name for name in tools.not_strict}
        # What is read is content, up to the beginning of a call.
        self._plain = False
        # The characters since the last call.
        self._lead: list[str] = []
        # Of them the mark, then a name or the end of a list, as far as they have come; whether white space
        # followed them.
        self._mark = ""
        self._is_parted = False

    def _end_python(self, call: PythonCall) -> None:
        """A call in Python is whole."""
        read = call.read(self._tools)
        if read is None:
            self._give_up(call.source)
            return
        self._forget()
        self._sink.begin(read[0])
        self._sink.argue(read[1])
        self.num_complete += 1

    def _give_up(self, text: str) -> None:
        """It is no call, up to `text`."""
        self._plain = True
        self._sink.content("".join(self._lead) + text)
        self._forget()

    def _up_to_call(self, text: str) -> tuple[str, str]:
        """Passes on content; (the beginning of a call, what follows it), or none."""
        before, mark, rest = split_at_marker(self._held + text, tuple(self._begins))
        self._sink.content(before)
        self._held = "" if mark else rest
        if mark is None:
            return "", ""
        self._plain = False
        self._forget()
        return mark, rest

    def _forget(self) -> None:
        self._lead.clear()
        self._mark, self._is_parted = "", False


class PythonicParser(MayBeCalls):
    """`[f(a=1), g(b="x")]` as the whole answer, perhaps between Llama 4's marks, or behind text. An
    answer that begins so and calls none of the request's tools is content.
    """

    behind_text = ("[", "(")

    def __init__(self, call_id: CallIds, tools: ToolTypes) -> None:
        super().__init__(call_id, tools)
        self._call: PythonCall | None = None
        self._in_list = False

    def _read(self, text: str) -> None:
        position = 0
        while position < len(text):
            if self._plain:
                mark, rest = self._up_to_call(text[position:])
                position = len(text) - len(rest)
                if mark:
                    self._in_list, self._lead = True, ["["]
                    self._call = PythonCall(mark[1:])
                continue
            character = text[position]
            position += 1
            if self._call is None:
                self._between(character)
            elif self._call.feed(character):
                ended, self._call = self._call, None
                self._end_python(ended)

    def _end(self) -> None:
        left = "".join(self._lead) + self._held
        if self._is_cut and self._call is not None:
            self._sink.begin(self._call.name)
            left = ""
        elif self._is_cut and not self._plain and (self.num_calls or left.lstrip().startswith(PYTHON_OPEN)):
            left = ""
        elif self._call is not None:
            left += self._call.source
        elif self.num_calls:
            left = left.strip(_SPACE + ",]").removesuffix(PYTHON_CLOSE)
        self._sink.content(left)
        self._lead.clear()

    def _between(self, character: str) -> None:
        self._lead.append(character)
        if character in _SPACE:
            self._is_parted = bool(self._mark)
            return
        if not self._in_list:
            self._before_list(character)
            return
        if not self._mark and character in "[,":
            return
        mark = self._mark = self._mark + character
        if mark.startswith("]") and self.num_calls:
            # What closes the list is no text; white space may stand around its parts.
            if mark[1:] in ("", PYTHON_CLOSE):
                self._lead.clear()
            elif not PYTHON_CLOSE.startswith(mark[1:]) or (self._is_parted and len(mark) > 2):
                self._give_up("")
            self._is_parted = False
        elif self._is_parted:
            self._give_up("")
        elif character == "(" and _NAME.fullmatch(mark[:-1]) and self._tools.knows(mark[:-1]):
            del self._lead[-len(mark) :]
            self._call = PythonCall(mark)
        elif len(mark) > _MAX_NAME or not _NAME.fullmatch(mark):
            self._give_up("")

    def _before_list(self, character: str) -> None:
        if character == "[" and self._mark in ("", PYTHON_OPEN):
            self._in_list, self._mark, self._is_parted = True, "", False
            return
        self._mark += character
        if self._is_parted or not PYTHON_OPEN.startswith(self._mark):
            self._give_up("")


def _python_value(node: ast.expr) -> Any:
    """A value as Python or JSON writes it."""
    if isinstance(node, ast.Name) and node.id in _NAMES_IN_JSON:
        return _NAMES_IN_JSON[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, ast.Constant) and isinstance(key.value, str) for key in node.keys):
            raise ValueError("a key of an object that is no text")
        return {
            ast.literal_eval(k): _python_value(v) for k, v in zip(node.keys, node.values, strict=True) if k
        }
    return ast.literal_eval(node)


class BracedParser(ToolCallParser):
    """`open NAME{key:value,…}close`: texts stand between quotes, keys and other values as they are."""

    def __init__(self, form: BracedForm, call_id: CallIds, tools: ToolTypes) -> None:
        super().__init__(call_id)
        self._form = form
        self._tools = tools
        # What was read of a call; None outside of calls.
        self._parts: list[str] | None = None
        self._in_text = False

    def _read(self, text: str) -> None:
        text = self._held + text
        self._held = ""
        while text:
            text = self._content(text) if self._parts is None else self._in_call(self._parts, text)

    def _end(self) -> None:
        if self._parts is None:
            self._end_of_content()
        elif self._is_cut:
            name, brace, _ = "".join(self._parts).partition("{")
            if brace and _NAME.fullmatch(name):
                self._sink.begin(name)
        else:
            self._sink.content(self._take_breaks() + self._form.open + "".join(self._parts) + self._held)
        self._parts = None

    def _content(self, text: str) -> str:
        mark, rest = self._content_up_to(text, (self._form.open,))
        if mark is not None:
            self._parts, self._in_text = [], False
        return rest

    def _in_call(self, parts: list[str], text: str) -> str:
        form = self._form
        marks = (form.quote,) if self._in_text else (form.quote, form.close)
        before, mark, rest = split_at_marker(text, marks)
        parts.append(before)
        if mark is None:
            self._held = rest
            return ""
        if mark == form.quote:
            parts.append(mark)
            self._in_text = not self._in_text
            return rest
        self._parts = None
        source = "".join(parts)
        name, _, body = source.partition("{")
        try:
            if not _NAME.fullmatch(name):
                raise ValueError(name)
            written = self._tools.written(name, _Braces(body + "}", form.quote).members())
        except _UNREADABLE:
            self._sink.content(self._take_breaks() + form.open + source + form.close)
            return rest
        self._num_breaks = 0
        self._sink.begin(name)
        self._sink.argue(written)
        self.num_complete += 1
        return rest


class _Braces:
    """Reads what stands behind an opening brace. Raises ValueError for another form."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def members(self) -> dict[str, Any]:
        """The whole text."""
        value = self._members()
        if self._text[self._at :].strip(_SPACE):
            raise ValueError("text after the end")
        return value

    def _members(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        while not self._took("}"):
            if found and not self._took(","):
                raise ValueError("no comma")
            if self._took(self._quote):
                key = self._up_to(self._quote)
                self._expect(":")
            else:
                key = self._up_to(":").strip(_SPACE).strip('"')
            found[key] = self._value()
        return found

    def _value(self) -> Any:
        if self._took(self._quote):
            return self._up_to(self._quote)
        if self._took("{"):
            return self._members()
        if self._took("["):
            values: list[Any] = []
            while not self._took("]"):
                if values:
                    self._expect(",")
                values.append(self._value())
            return values
        start = self._at
        while self._at < len(self._text) and self._text[self._at] not in ",}]":
            self._at += 1
        written = self._text[start : self._at].strip(_SPACE)
        if not written:
            raise ValueError("no value")
        try:
            return json.loads(written)
        except ValueError:
            return {"None": None, "True": True, "False": False}.get(written, written)

    def _took(self, mark: str) -> bool:
        while self._text[self._at : self._at + 1] in _SPACE and self._at < len(self._text):
            self._at += 1
        if not self._text.startswith(mark, self._at):
            return False
        self._at += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._took(mark):
            raise ValueError(f"no {mark}")

    def _up_to(self, mark: str) -> str:
        end = self._text.find(mark, self._at)
        if end < 0:
            raise ValueError(f"no {mark}")
        text = self._text[self._at : end]
        self._at = end + len(mark)
        return text
