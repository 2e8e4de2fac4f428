"""Grammars of tool calls, in the format that the model was trained to write.

Free text may precede calls when they are optional; from the opening mark of a call on, name and arguments are
constrained. Arguments of every tool are a grammar of their own, so their schemas never meet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain

import msgspec
from msgspec.structs import astuple

from contract.chat import ToolChoiceMode
from contract.formats import THINK_CLOSE, THINK_OPEN
from contract.grammar import EnforcementReport, KeywordStatus
from tokenizer_svc.grammar.backend import Grammar
from tokenizer_svc.grammar.request import GrammarRefused, ToolRules, ToolSpec
from tokenizer_svc.grammar.schema.compiler import SchemaRefused, compile_schema
from tokenizer_svc.text import formats


class _Layout(msgspec.Struct, frozen=True, kw_only=True):
    """How a family writes calls. `{name}` in `before` is the tool's name as JSON text, `{raw}` as it is, and
    `{id}` the call's id.
    """

    # Opens the block of calls, and makes free text end where calls are optional.
    mark: str
    # Text that may stand between the mark and the first call, as Lark.
    opening: str = ""
    before: str
    after: str
    between: str
    end: str = ""
    # The block may begin without the mark, where an answer that begins with "{" is a call.
    bare: bool = False


# The form of a call's id that Mistral's templates accept.
_CALL_ID = "/[a-zA-Z0-9]{9}/"
LAYOUTS: Mapping[str, _Layout] = {
    formats.HERMES: _Layout(
        mark="<tool_call>",
        before='\n{"name": {name}, "arguments": ',
        after="}\n",
        between="</tool_call>\n<tool_call>",
        end="</tool_call>",
    ),
    formats.LLAMA3: _Layout(
        mark="<|python_tag|>",
        before='{"name": {name}, "parameters": ',
        after="}",
        between="; ",
        bare=True,
    ),
    formats.MISTRAL: _Layout(
        mark="[TOOL_CALLS]",
        opening='/ {0,2}/ "["',
        before='{"name": {name}, "arguments": ',
        after="}",
        between=", ",
        end="]",
    ),
    formats.MISTRAL_V11: _Layout(
        mark="[TOOL_CALLS]", before="{raw}[CALL_ID]{id}[ARGS]", after="", between="[TOOL_CALLS]"
    ),
    formats.MISTRAL_V13: _Layout(mark="[TOOL_CALLS]", before="{raw}[ARGS]", after="", between="[TOOL_CALLS]"),
    formats.DEEPSEEK: _Layout(
        mark="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{raw}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    formats.DEEPSEEK_V31: _Layout(
        mark="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>{raw}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
}


def tool_grammars(
    rules: ToolRules,
    answer: Grammar | None,
    token_ids: Mapping[str, int],
    max_schema_depth: int,
    left_out: Mapping[str, str] | None = None,
) -> tuple[list[Grammar], EnforcementReport]:
    """The start grammar, then those of each tool's arguments and of `answer`, the alternative to calls.

    `token_ids` are control tokens, which cannot be spelled as text. `left_out` has the paths of keywords that
    shall not be enforced, see `parameters_path`, with the reason that the report gives.
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
    alternatives = []
    for index, tool in enumerate(rules.tools):
        grammar, report = _arguments_grammar(tool, index, max_schema_depth, left_out or {})
        reports.append(report)
        grammars.append({"name": f"arguments_{index}", **grammar})
        before = layout.before.replace("{name}", json.dumps(tool.name, ensure_ascii=False))
        before = before.replace("{raw}", tool.name)
        alternatives.append(
            f"{_with_id(before, token_ids)} @arguments_{index} {_literal(layout.after, token_ids)}"
        )
    more = f"({_literal(layout.between, token_ids)} call)*" if rules.parallel else ""
    lines = [
        "call: " + "\n    | ".join(alternatives),
        f"calls: {layout.opening} call {more} {_literal(layout.end, token_ids)}",
    ]
    if rules.mode is not ToolChoiceMode.AUTO:
        mark = _literal(layout.mark, token_ids)
        lines.append(f"start: {f'({mark})?' if layout.bare else mark} calls")
    else:
        if answer is not None:
            grammars.append({"name": "answer", **answer})
        lines += _optional(layout, token_ids, has_answer=answer is not None)
    return [{"name": "tool_calls", "lark_grammar": "\n".join(lines) + "\n"}, *grammars], _joined(reports)


def _optional(layout: _Layout, token_ids: Mapping[str, int], *, has_answer: bool) -> list[str]:
    """Rules of an answer that may or may not call: constrained from the mark on."""
    mark = _literal(layout.mark, token_ids)
    if has_answer:
        return [f"start: {f'({mark})?' if layout.bare else mark} calls | @answer"]
    if layout.bare:
        return [f"start: TEXT | ({mark})? calls |", "TEXT: /[^{](.|\\n)*/"]
    # Free text that spells the mark would be taken for a call by parsers.
    text = f"TEXT: /(?s:.+)/ & ~/(?s:.*{re.escape(layout.mark)}.*)/"
    if layout.mark in token_ids:
        others = [token_ids[tag] for tag in (THINK_OPEN, THINK_CLOSE) if tag in token_ids]
        text_rule = "text: (TEXT | <[" + ",".join(map(str, others)) + "]>)*" if others else "text: TEXT?"
        return [f"start: text | text {mark} calls", text_rule, text]
    return [
        "start: TEXT | | until_mark calls",
        f"until_mark[lazy]: /(?s:.*)/ {mark}",
        text,
    ]


def _with_id(text: str, token_ids: Mapping[str, int]) -> str:
    return f" {_CALL_ID} ".join(_literal(part, token_ids) for part in text.split("{id}"))


def _literal(text: str, token_ids: Mapping[str, int]) -> str:
    """`text` as Lark symbols; control tokens in it by id."""
    if not text:
        return ""
    for token, token_id in token_ids.items():
        before, found, after = text.partition(token)
        if found:
            parts = (_literal(before, token_ids), f"<[{token_id}]>", _literal(after, token_ids))
            return " ".join(part for part in parts if part)
    return json.dumps(text, ensure_ascii=False)


def parameters_path(index: int) -> str:
    """Before the paths of a tool's parameters, in reports about several."""
    return f"/tools/{index}/parameters"


def parameters_field(index: int) -> str:
    """The request's field with a tool's parameters."""
    return f"tools[{index}].function.parameters"


# Keywords beside which an empty list of properties means that there are none.
_WITHOUT_ARGUMENTS = frozenset(
    {"type", "properties", "required", "title", "description", "$schema", "strict"}
)


def _arguments_grammar(
    tool: ToolSpec, index: int, max_depth: int, left_out: Mapping[str, str]
) -> tuple[Grammar, EnforcementReport]:
    prefix = parameters_path(index)
    schema = tool.parameters or {"properties": {}}
    if (
        schema.get("properties") == {}
        and not schema.get("required")
        and _WITHOUT_ARGUMENTS.issuperset(schema)
    ):
        # The form in which clients say that there are no arguments; with others, models invent some.
        schema = {**schema, "additionalProperties": False}
    if "type" not in schema and "$ref" not in schema:
        schema = {"type": "object", **schema}
    try:
        here = {
            path.removeprefix(prefix): note
            for path, note in left_out.items()
            if path.startswith(f"{prefix}/")
        }
        compiled = compile_schema(schema, strict=tool.strict, max_depth=max_depth, left_out=here)
    except SchemaRefused as refused:
        message = f"tool {tool.name!r}: {refused}"
        raise GrammarRefused(message, parameters_field(index), refused.enforcement) from refused
    return compiled.grammar, _under(prefix, compiled.enforcement)


def _under(prefix: str, report: EnforcementReport) -> EnforcementReport:
    return EnforcementReport(
        *(
            tuple(KeywordStatus(each.keyword, prefix + each.path, each.note) for each in statuses)
            for statuses in astuple(report)
        )
    )


def _joined(reports: list[EnforcementReport]) -> EnforcementReport:
    return EnforcementReport(*(tuple(chain(*parts)) for parts in zip(*map(astuple, reports), strict=True)))
