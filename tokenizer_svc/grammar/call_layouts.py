"""How every family writes its calls: what stands around their names and arguments. A row each."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from contract.formats import BRACED, JSON, SECTIONS, TAGGED, BracedForm, JsonForm, SectionForm, TaggedForm
from tokenizer_svc.text import formats

HARMONY = "harmony"


class CallLayout(msgspec.Struct, frozen=True, kw_only=True):
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
    # The block may begin without the mark: answers that begin as this pattern are no calls.
    no_call: str = ""
    # Form of ids, as Lark: at first that which Mistral's templates accept.
    call_id: str = "/[a-zA-Z0-9]{9}/"
    # How arguments are written that are no JSON object.
    arguments: TaggedForm | BracedForm | None = None
    is_python: bool = False


_OBJECT = '{"name": {name}, "arguments": '


def _list(form: JsonForm) -> CallLayout:
    end = "]" if form.close == "]" else "]" + form.close
    # A word of the language is a mark with what follows it alone.
    mark, opening = (form.open + "[", "") if form.open.isalpha() else (form.open, '"["')
    return CallLayout(mark=mark, opening=opening, before=_OBJECT, after="}", between=", ", end=end)


def _section(form: SectionForm, name: str, call_id: str) -> CallLayout:
    before = f"{form.call_open}{name}{form.separator}"
    return CallLayout(
        mark=form.open, before=before, after=form.call_close, between="", end=form.close, call_id=call_id
    )


def _tagged(form: TaggedForm) -> CallLayout:
    if form.call_open:
        # Several calls stand in one section, or each in its own.
        shared = form.name_close != ">"
        before = f"\n{form.call_open}{{raw}}{form.name_close}\n"
        between = "" if shared else f"\n{form.close}\n{form.open}"
        end = f"\n{form.close}"
    else:
        # What ends the name also stands between calls.
        between = f"{form.close}{form.name_close}{form.open}"
        before, end = f"{{raw}}{form.name_close}", form.close
    return CallLayout(
        mark=form.open, before=before, after=form.call_close, between=between, end=end, arguments=form
    )


def _braced(form: BracedForm) -> CallLayout:
    # The mark is what free text may not have: where it is a token, the rest belongs to the call.
    mark = form.open.removesuffix("call:")
    return CallLayout(mark=mark, before="call:{raw}{", after=form.close, between=mark, arguments=form)


LAYOUTS: Mapping[str, CallLayout] = {
    formats.HERMES: CallLayout(
        mark="<tool_call>",
        before='\n{"name": {name}, "arguments": ',
        after="}\n",
        between="</tool_call>\n<tool_call>",
        end="</tool_call>",
    ),
    formats.LLAMA3: CallLayout(
        mark="<|python_tag|>",
        before='{"name": {name}, "parameters": ',
        after="}",
        between="; ",
        no_call="[^{]",
    ),
    formats.LLAMA4: CallLayout(
        mark="<|python_start|>",
        opening='"["',
        before="{raw}(",
        after=")",
        between=", ",
        end="]",
        no_call=r"([^\[]|\[[^a-zA-Z_])",
        is_python=True,
    ),
    formats.MISTRAL: CallLayout(
        mark="[TOOL_CALLS]",
        opening='/ {0,2}/ "["',
        before='{"name": {name}, "arguments": ',
        after="}",
        between=", ",
        end="]",
    ),
    formats.MISTRAL_V11: CallLayout(
        mark="[TOOL_CALLS]", before="{raw}[CALL_ID]{id}[ARGS]", after="", between="[TOOL_CALLS]"
    ),
    formats.MISTRAL_V13: CallLayout(
        mark="[TOOL_CALLS]", before="{raw}[ARGS]", after="", between="[TOOL_CALLS]"
    ),
    formats.DEEPSEEK: CallLayout(
        mark="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{raw}\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
    ),
    formats.DEEPSEEK_V31: CallLayout(
        mark="<｜tool▁calls▁begin｜>",
        before="<｜tool▁call▁begin｜>{raw}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        between="",
        end="<｜tool▁calls▁end｜>",
    ),
    **{name: _list(JSON[name]) for name in ("granite", "phi4", "functools")},
    "command": CallLayout(
        mark=JSON["command"].open,
        opening='"[" /[ \\n]{0,8}/',
        before='{"tool_call_id": "{id}", "tool_name": {name}, "parameters": ',
        after="}",
        between=",\n    ",
        end="\n]" + JSON["command"].close,
        call_id="/[0-9]{1,4}/",
    ),
    "kimi": _section(SECTIONS["kimi"], "functions.{raw}:{id}", "/[0-9]{1,4}/"),
    **{name: _tagged(form) for name, form in TAGGED.items()},
    **{name: _braced(form) for name, form in BRACED.items()},
    # Messages, which `tools` writes itself.
    HARMONY: CallLayout(mark="<|channel|>", before="", after="", between=""),
}
