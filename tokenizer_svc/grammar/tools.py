"""Grammars of tool calls, in the format that the model was trained to write.

Free text may precede calls when they are optional; from the opening mark of a call on, name and arguments are
constrained. Arguments of every tool are a grammar of their own, so their schemas never meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

from msgspec.structs import astuple

from contract.chat import ToolChoiceMode
from contract.formats import REASONING, BracedForm, TaggedForm
from contract.grammar import EnforcementReport, KeywordStatus
from tokenizer_svc.grammar.backend import Grammar
from tokenizer_svc.grammar.call_layouts import HARMONY, LAYOUTS, CallLayout
from tokenizer_svc.grammar.lark_source import NotWritable
from tokenizer_svc.grammar.led_input import LedInput, as_lark
from tokenizer_svc.grammar.plain_arguments import PlainArguments, tagged_argument
from tokenizer_svc.grammar.request import GrammarRefused, ToolRules, ToolSpec
from tokenizer_svc.grammar.schema.compiler import CompiledSchema, SchemaRefused, compile_schema

INPUT_GRAMMAR = "input_grammar"
PARAMETERS = "parameters"
# Makes the library not tokenize what has to come next: it would take control tokens of its own choice for
# text that spells them, and refuse them then.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
# Of a tag that is more than a token, the token.
_REASONING_TAGS = tuple(
    dict.fromkeys(
        tag.removesuffix("thought\n")
        for form in REASONING.values()
        for tag in (form.open, form.close, form.answer_open, form.answer_close)
        if tag
    )
)


def tool_grammars(
    rules: ToolRules,
    answer: Grammar | None,
    token_ids: Mapping[str, int],
    max_schema_depth: int,
    left_out: Mapping[str, str] | None = None,
) -> tuple[list[Grammar], EnforcementReport]:
    """The start grammar, then those of each tool's arguments and of `answer`, the alternative to calls.

    `token_ids` are control tokens, which cannot be spelled as text. `left_out` has the paths of keywords, or
    of whole schemas, that shall not be enforced, see `parameters_path`, with the reason for the report.
    Raises GrammarRefused.
    """
    layout = LAYOUTS.get(rules.format)
    if layout is None:
        raise GrammarRefused(
            "the model's chat template has no known tool-call format; use tool_choice none or auto, or have "
            "the model served with --tool-call-parser",
            "tool_choice",
        )
    grammars: list[Grammar] = []
    reports: list[EnforcementReport] = []
    alternatives, lines = [], []
    shared: dict[str, str] = {}
    for index, tool in rules.numbered():
        written = _Arguments(tool, index, max_schema_depth, left_out or {}, shared)
        arguments = written.rule(layout, lambda text: literal(text, token_ids))
        grammars += written.grammars
        reports.append(written.report)
        lines += written.lines
        if rules.format == HARMONY:
            alternatives.append(_message_to(tool.name, arguments, token_ids))
            continue
        before = layout.before.replace("{name}", json.dumps(tool.name, ensure_ascii=False))
        before = before.replace("{raw}", tool.name)
        alternatives.append(
            f"{_with_id(before, layout.call_id, token_ids)} {arguments} {literal(layout.after, token_ids)}"
        )
    more = f"({literal(layout.between, token_ids)} call)*" if rules.parallel else ""
    lines = [
        *_unforced(rules, token_ids),
        "call: " + "\n    | ".join(alternatives),
        f"calls: {layout.opening} call {more} {literal(layout.end, token_ids)}",
        *lines,
    ]
    has_answer = rules.mode is ToolChoiceMode.AUTO and answer is not None
    if has_answer and answer is not None:
        grammars.append({"name": "answer", **answer})
    if rules.format == HARMONY:
        lines += _messages(rules.mode, token_ids, has_answer=has_answer)
    elif rules.mode is not ToolChoiceMode.AUTO:
        mark = literal(layout.mark, token_ids)
        lines.append(f"start: {f'({mark})?' if layout.no_call else mark} calls")
    else:
        lines += _optional(layout, token_ids, has_answer=has_answer)
    return [{"name": "tool_calls", "lark_grammar": "\n".join(lines) + "\n"}, *grammars], _joined(reports)


def _unforced(rules: ToolRules, token_ids: Mapping[str, int]) -> list[str]:
    """What keeps the back end from forcing texts of inputs that spell control tokens; see `NO_FORCING`."""
    spells = any(token in tool.input_grammar for tool in rules.tools for token in token_ids)
    return [NO_FORCING.strip()] if spells else []


def _message_to(name: str, arguments: str, token_ids: Mapping[str, int]) -> str:
    """A call in harmony: a message to the tool, whose recipient stands before its channel or after it."""
    to = f" to=functions.{name}"
    after = literal(f"<|channel|>commentary{to}", token_ids)
    before = literal(f"{to}<|channel|>commentary", token_ids)
    kind = f'(" "? {literal("<|constrain|>", token_ids)}? "json")?'
    return f"({after} | {before}) {kind} {literal('<|message|>', token_ids)} {arguments}"


def _messages(mode: ToolChoiceMode, token_ids: Mapping[str, int], *, has_answer: bool) -> list[str]:
    """Rules of an answer in harmony: messages of thoughts and before calls, then a call or the answer."""
    channel, message = literal("<|channel|>", token_ids), literal("<|message|>", token_ids)
    last = f'{channel} "final" {message} {"@answer" if has_answer else "MESSAGE?"}'
    end = f"call {literal('<|call|>', token_ids)}?"
    return [
        f"start: message* {end if mode is not ToolChoiceMode.AUTO else f'({end} | {last})'}",
        f'message: {channel} ("analysis" | "commentary") {message} MESSAGE? '
        + literal("<|end|><|start|>assistant", token_ids),
        "MESSAGE: /(?s:.+)/",
    ]


def _optional(layout: CallLayout, token_ids: Mapping[str, int], *, has_answer: bool) -> list[str]:
    """Rules of an answer that may or may not call: constrained from the mark on."""
    mark = literal(layout.mark, token_ids)
    if has_answer:
        return [f"start: {f'({mark})?' if layout.no_call else mark} calls | @answer"]
    if layout.no_call:
        return [f"start: TEXT | ({mark})? calls |", f"TEXT: /{layout.no_call}(.|\\n)*/"]
    # Free text that spells the mark would be taken for a call by parsers.
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*{re.escape(layout.mark)}.*)/"
    if "<[" in mark:
        others = [token_ids[tag] for tag in _REASONING_TAGS if tag in token_ids]
        text_rule = "text: (TEXT | <[" + ",".join(map(str, others)) + "]>)*" if others else "text: TEXT?"
        # Text before the mark's token would be the end of the free text as well.
        return [f"start: text | text {mark[mark.index('<[') :]} calls", text_rule, text]
    return [
        "start: TEXT | | until_mark calls",
        f"until_mark[lazy]: /(?s:.*)/ {mark}",
        text,
    ]


def _with_id(text: str, call_id: str, token_ids: Mapping[str, int]) -> str:
    return f" {call_id} ".join(literal(part, token_ids) for part in text.split("{id}"))


def literal(text: str, token_ids: Mapping[str, int]) -> str:
    """`text` as Lark symbols; control tokens in it by id."""
    if not text:
        return ""
    for token, token_id in token_ids.items():
        before, found, after = text.partition(token)
        if found:
            parts = (literal(before, token_ids), f"<[{token_id}]>", literal(after, token_ids))
            return " ".join(part for part in parts if part)
    return json.dumps(text, ensure_ascii=False)


def parameters_path(index: int) -> str:
    """Before the paths of a tool's parameters, in reports about several."""
    return f"/tools/{index}/parameters"


def input_field(index: int) -> str:
    """The request's field with the grammar of a tool's input."""
    return f"tools[{index}].function.input_grammar"


def input_status(index: int, why: str) -> KeywordStatus:
    """What is reported of such a grammar that is not enforced."""
    return KeywordStatus(INPUT_GRAMMAR, f"/tools/{index}/{INPUT_GRAMMAR}", why)


def parameters_status(index: int, name: str, why: str) -> KeywordStatus:
    """What is reported of a schema of which nothing is enforced."""
    note = f"tool {name!r} takes any JSON object, because its schema cannot be enforced: {why}"
    return KeywordStatus(PARAMETERS, parameters_path(index), note)


def parameters_field(index: int) -> str:
    """The request's field with a tool's parameters."""
    return f"tools[{index}].function.parameters"


# Keywords beside which an empty list of properties means that there are none.
_WITHOUT_ARGUMENTS = frozenset(
    {"type", "properties", "required", "title", "description", "$schema", "strict"}
)


class _Arguments:
    """The arguments of one tool: grammars of their own, and rules where they are no JSON object."""

    def __init__(
        self,
        tool: ToolSpec,
        index: int,
        max_depth: int,
        left_out: Mapping[str, str],
        shared: dict[str, str],
    ) -> None:
        self._tool = tool
        self._index = index
        self._max_depth = max_depth
        self._left_out = left_out
        # Symbols of values that several arguments have alike, also those of other tools.
        self._shared = shared
        # Why nothing of the schema is enforced, or None.
        self._why_any = self._left_out.get(parameters_path(index))
        self._schema = {"type": "object"} if self._why_any is not None else _completed(tool.parameters)
        self.grammars: list[Grammar] = []
        self.lines: list[str] = []
        self.report = EnforcementReport()

    def rule(self, layout: CallLayout, write: Callable[[str], str]) -> str:
        """The symbol of all arguments. Raises GrammarRefused."""
        if isinstance(self._schema.get("type"), str) and self._schema["type"] != "object":
            problem = f"arguments are an object, and the schema's type is {self._schema['type'][:40]!r}"
            message = f"tool {self._tool.name!r}: {problem}; use type object"
            raise GrammarRefused(message, parameters_field(self._index))
        compiled = self._compiled(self._schema, strict=self._tool.strict)
        prefix = parameters_path(self._index)
        self.report = _under(prefix, compiled.enforcement)
        if self._why_any is not None:
            status = parameters_status(self._index, self._tool.name, self._why_any)
            self.report = EnforcementReport(unenforced=(status,))
        if self._tool.input_grammar:
            try:
                return self._led(layout, write)
            except NotWritable as why:
                self._settle(EnforcementReport(unenforced=(input_status(self._index, str(why)),)))
        if layout.arguments is None and not layout.is_python:
            return self._named(compiled.grammar)
        plain = PlainArguments(self._index, self._schema, self._part, write, self._shared)
        match layout.arguments:
            case TaggedForm() as form:
                symbol = plain.tagged(form)
            case BracedForm() as form:
                symbol = plain.braced(form)
            case None:
                symbol = plain.pythonic()
        self.lines = plain.rules
        self._settle(_under(prefix, EnforcementReport(unenforced=tuple(plain.unenforced))))
        return symbol

    def _led(self, layout: CallLayout, write: Callable[[str], str]) -> str:
        """The symbol of arguments that are one text, which follows a grammar. Raises NotWritable."""
        match layout.arguments:
            case TaggedForm() as form:
                led = self._input(write(form.pad + form.value_close), form.pad + form.value_close)
                symbol = tagged_argument(write("input"), ("true",), led, form, write)
            case BracedForm() as form:
                symbol = f"{write(f'input:{form.quote}')} {self._input(write(form.quote), form.quote)}"
            case None if layout.is_python:
                symbol = " ".join((write('input="'), self._input("", '"', in_json=True)))
            case None:
                opens = " | ".join(write(each) for each in ('{"input": "', '{"input":"'))
                symbol = " ".join((f"({opens})", self._input("", '"}', in_json=True)))
        return symbol

    def _input(self, mark: str, close: str, *, in_json: bool = False) -> str:
        """The symbol of the text and of what ends it: `close`, in Lark `mark`."""
        lark = as_lark(self._tool.input_syntax, self._tool.input_grammar)
        before, is_token, token = mark.partition("<[")
        led = LedInput(lark, self._index, in_json=in_json, close="" if is_token else close)
        self.lines = led.rules
        # What pads a text before a token may be the end of the text as well.
        pad = f"({before.strip()})?" if before and is_token else ""
        return f"{led.symbol} {pad} {is_token}{token}"

    def _settle(self, lost: EnforcementReport) -> None:
        """Takes what the format cannot enforce out of the report; refuses it where the tool is strict."""
        paths = {each.path for each in lost.unenforced}
        kept = tuple(each for each in self.report.enforced if each.path not in paths)
        self.report = EnforcementReport(
            kept, self.report.approximated, (*self.report.unenforced, *lost.unenforced)
        )
        if self._tool.strict and lost.unenforced:
            first = lost.unenforced[0]
            is_input = first.keyword == INPUT_GRAMMAR
            raise GrammarRefused(
                f"tool {self._tool.name!r}: {first.keyword} at {first.path} cannot be enforced: "
                f"{first.note}; change the schema, or set strict to false and check the arguments",
                input_field(self._index) if is_input else parameters_field(self._index),
                self.report,
            )

    def _part(self, schema: Any, path: str) -> str:
        """The symbol of a value in JSON, by a part of the schema."""
        whole = {word: self._schema[word] for word in ("$defs", "definitions") if word in self._schema}
        part = {**whole, **schema} if isinstance(schema, dict) else schema
        grammar = self._compiled(part, strict=False, path=path).grammar
        key = json.dumps(grammar)
        if key not in self._shared:
            self._shared[key] = self._named(grammar)
        return self._shared[key]

    def _named(self, grammar: Grammar) -> str:
        name = f"arguments_{self._index}" + (f"_{len(self.grammars)}" if self.grammars else "")
        self.grammars.append({"name": name, **grammar})
        return f"@{name}"

    def _compiled(self, schema: Any, *, strict: bool, path: str = "") -> CompiledSchema:
        prefix = parameters_path(self._index) + path
        here = {
            each.removeprefix(prefix): note
            for each, note in self._left_out.items()
            if each.startswith(f"{prefix}/")
        }
        try:
            return compile_schema(schema, strict=strict, max_depth=self._max_depth, left_out=here)
        except SchemaRefused as refused:
            message = f"tool {self._tool.name!r}: {refused}"
            raise GrammarRefused(message, parameters_field(self._index), refused.enforcement) from refused


def _completed(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A tool's schema as one of objects."""
    schema = parameters or {"properties": {}}
    if (
        schema.get("properties") == {}
        and not schema.get("required")
        and _WITHOUT_ARGUMENTS.issuperset(schema)
    ):
        # The form in which clients say that there are no arguments; with others, models invent some.
        schema = {**schema, "additionalProperties": False}
    kinds = schema.get("type")
    if isinstance(kinds, list) and "object" in kinds:
        # Calls have arguments, though a schema that programs made may allow none.
        schema = {**schema, "type": "object"}
    if "type" not in schema and "$ref" not in schema:
        schema = {"type": "object", **schema}
    return schema


def _under(prefix: str, report: EnforcementReport) -> EnforcementReport:
    return EnforcementReport(
        *(
            tuple(KeywordStatus(each.keyword, prefix + each.path, each.note) for each in statuses)
            for statuses in astuple(report)
        )
    )


def _joined(reports: list[EnforcementReport]) -> EnforcementReport:
    return EnforcementReport(*(tuple(chain(*parts)) for parts in zip(*map(astuple, reports), strict=True)))
