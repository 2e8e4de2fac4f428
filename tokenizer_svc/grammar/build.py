"""A grammar for one request: the response format, or tool calls in the model's own format, or both.

Runs in a worker process; everything here may be slow, and is killed when it is.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import jsonschema_rs
import llguidance
import msgspec

from contract.chat import (
    ChoiceFormat,
    EbnfFormat,
    JsonObjectFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    ResponseFormat,
)
from contract.formats import REASONING, ReasoningForm
from contract.grammar import EnforcementReport
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend, Grammar, serialize
from tokenizer_svc.grammar.call_layouts import HARMONY
from tokenizer_svc.grammar.endless import Endless, needing_first_items, without_endless
from tokenizer_svc.grammar.gbnf import gbnf_to_lark
from tokenizer_svc.grammar.led_input import as_lark
from tokenizer_svc.grammar.request import Built, GrammarRefused, GrammarRequest, Reasoning, WorkerReply
from tokenizer_svc.grammar.schema.back_end_numbers import NOT_FINITE
from tokenizer_svc.grammar.schema.compiler import LAYOUT, SchemaRefused, compile_schema
from tokenizer_svc.grammar.schema.divisors import unwritable_divisors
from tokenizer_svc.grammar.schema.repair import MAX_REPAIRS, repair
from tokenizer_svc.grammar.schema.unwritable import culprits, parts, places
from tokenizer_svc.grammar.tools import (
    NO_FORCING,
    input_field,
    literal,
    parameters_field,
    parameters_path,
    tool_grammars,
)

# Turns on the flag that makes white space and comments of a regular expression layout.
_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")
# Where in the text that is written for the back end its error is.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
# Begin the errors of what runs out of the bounds of `contract.grammar_cost`.
_OUT_OF_BOUNDS = (
    "lexer error: too many expressions",
    "initial lexer configuration",
    "Parser Error: Current row",
)


def build(request: GrammarRequest, backend: Backend, limits: PromptLimitsConfig) -> WorkerReply:
    """The grammar, or why there is none."""
    start = time.perf_counter()
    try:
        _check_inputs(request, backend)
        payload, enforcement = _built(request, backend, limits)
    except GrammarRefused as refusal:
        return WorkerReply(refused=refusal.refused)
    elapsed = time.perf_counter() - start
    return WorkerReply(built=Built(payload=payload.encode(), enforcement=enforcement, compile_s=elapsed))


def _built(
    request: GrammarRequest, backend: Backend, limits: PromptLimitsConfig
) -> tuple[str, EnforcementReport | None]:
    """The payload, and what is enforced. A tool that is not strict, and whose schema cannot be compiled,
    takes any object, because one tool of many must not make a conversation unusable. Raises GrammarRefused.
    """
    tools = request.tools.numbered() if request.tools is not None else ()
    left_out = {parameters_path(index): tool.left_out for index, tool in tools if tool.left_out}
    while True:
        try:
            return _compiled(request, backend, limits, left_out)
        except Endless as endless:
            refusal = _never_ends(request, endless, limits)
        except GrammarRefused as refused:
            refusal = refused
        left_out |= _tools_at_fault(request, refusal, backend, limits, left_out)


def _compiled(
    request: GrammarRequest, backend: Backend, limits: PromptLimitsConfig, left_out: Mapping[str, str]
) -> tuple[str, EnforcementReport | None]:
    """The same without the schemas of the tools in `left_out`. Raises Endless and GrammarRefused."""
    grammars, enforcement = _grammars(request, limits, backend.named_tokens, left_out)
    payload, error = _written(grammars, backend, limits)
    if error:
        return _without_culprits(request, error, enforcement, backend, limits, left_out)
    return payload, enforcement


def _tools_at_fault(
    request: GrammarRequest,
    refusal: GrammarRefused,
    backend: Backend,
    limits: PromptLimitsConfig,
    left_out: Mapping[str, str],
) -> dict[str, str]:
    """The paths of the tools whose schemas are to be left out next, with the reason. Raises `refusal` where
    that would not help, or one of them is strict; it names the tool.
    """
    tools = {each.prefix: each for each in _tool_sources(request) if each.prefix not in left_out}
    found = [path for path, tool in tools.items() if tool.field == refusal.refused.field]
    if not found and refusal.refused.field == request.field:
        lenient = _lenient(request)

        def compiles(paths: list[str]) -> bool:
            try:
                return bool(_compiled(lenient, backend, limits, {**left_out, **dict.fromkeys(paths, "")}))
            except (Endless, GrammarRefused):
                return False

        # What compiles when nothing is strict is refused for the answer's own schema.
        found = [] if compiles([]) else culprits(list(tools), compiles)
    strict = next((tools[path] for path in found if tools[path].is_strict), None)
    if strict is not None and not str(refusal).startswith(strict.title):
        enforcement = refusal.refused.enforcement
        raise GrammarRefused(f"{strict.title}{refusal}", strict.field, enforcement) from refusal
    if strict is not None or not found:
        raise refusal
    return {path: str(refusal).removeprefix(tools[path].title) for path in found}


def _check_inputs(request: GrammarRequest, backend: Backend) -> None:
    """Raises GrammarRefused for what is no grammar of a tool's input, or no finite text matches."""
    for index, tool in request.tools.numbered() if request.tools is not None else ():
        if not tool.input_grammar:
            continue
        field = input_field(index)
        if tool.input_syntax not in ("lark", "regex"):
            problem = f"tool {tool.name!r}: the syntax {tool.input_syntax[:40]!r} is not one of lark, regex"
            raise GrammarRefused(problem, f"tools[{index}].function.input_syntax")
        properties = (tool.parameters or {}).get("properties")
        if not isinstance(properties, dict) or list(properties) != ["input"]:
            problem = (
                f"tool {tool.name!r}: a grammar leads a tool whose one argument is input; declare it alone"
            )
            raise GrammarRefused(problem, field)
        form: LarkFormat | RegexFormat = LarkFormat(tool.input_grammar)
        if tool.input_syntax == "regex":
            form = RegexFormat(tool.input_grammar)
        if isinstance(form, RegexFormat):
            _lark_pattern(form.pattern, field)
        grammar = {"name": "answer", "lark_grammar": as_lark(tool.input_syntax, tool.input_grammar)}
        try:
            rules, _ = backend.endless_rules(grammar)
            error = _never_ends_as_text(form, rules) if rules else backend.error(serialize([grammar]))
        except UnicodeEncodeError:
            error = "there is half a surrogate pair in it, which no text in UTF-8 holds"
        if error:
            raise GrammarRefused(f"tool {tool.name!r}: {_told(error, form)}", field)


def _written(grammars: list[Grammar], backend: Backend, limits: PromptLimitsConfig) -> tuple[str, str]:
    """The payload, and why it cannot be used or ""; repairs what can be repaired. Raises Endless."""
    error = ""
    for _ in range(MAX_REPAIRS):
        try:
            payload = serialize(grammars)
            if backend.spells_named_token(payload):
                payload = serialize(_unforced(grammars, backend))
        except UnicodeEncodeError:
            return "", "there is half a surrogate pair in it, which no text in UTF-8 holds"
        except ValueError:
            return "", NOT_FINITE
        if len(payload) > limits.max_artifact_bytes:
            limit = limits.max_artifact_bytes
            return "", f"the grammar grows to {len(payload)} bytes; the limit is {limit}"
        if '"contains"' in payload and needing_first_items(grammars, backend):
            continue
        error = _foreseen(grammars, payload)
        if not error and without_endless(grammars, backend):
            continue
        error = error or backend.error(payload)
        if not error:
            return payload, ""
        if not _repaired(grammars, error):
            break
    return "", error or f"more than {MAX_REPAIRS} of its definitions have to be rewritten one after the other"


def _foreseen(grammars: list[Grammar], payload: str) -> str:
    """Why the back end would take too long, as far as that is easily seen, or ""."""
    if '"multipleOf"' not in payload:
        return ""
    errors = (unwritable_divisors(each["json_schema"]) for each in grammars if "json_schema" in each)
    return next(filter(None, errors), "")


def _without_culprits(
    request: GrammarRequest,
    error: str,
    enforcement: EnforcementReport | None,
    backend: Backend,
    limits: PromptLimitsConfig,
    tools_left_out: Mapping[str, str],
) -> tuple[str, EnforcementReport | None]:
    """The payload without the keywords of a schema that the back end stops at, and what is enforced then.

    Raises GrammarRefused when strict, with those keywords, and for all others that it stops at.
    """
    told = _told(error, request.response_format)
    if told == NOT_FINITE:
        told += "".join(f", not so at {path}" for path in _not_finite(request)[:1])
    sources = [each for each in _sources(request) if each.prefix not in tools_left_out]
    sources = [] if _is_unsatisfiable(error) else sources
    lenient = _lenient(request)

    def attempt(left_out: list[str]) -> tuple[str, EnforcementReport | None]:
        notes = {**tools_left_out, **dict.fromkeys(left_out, told)}
        grammars, report = _grammars(lenient, limits, backend.named_tokens, notes)
        return _written(grammars, backend, limits)[0], report

    kept = [path for source in sources for path in places(source.schema, source.prefix)]
    found = culprits(kept, lambda some: bool(attempt(some)[0]))
    if not found:
        raise GrammarRefused(told, request.field, enforcement)
    payload, report = attempt(found)
    for path in found:
        source = next(each for each in sources if path.startswith(f"{each.prefix}/"))
        readable = _is_readable(source.schema)
        if source.is_strict or not readable:
            place, more = path.removeprefix(source.prefix), len(found) - 1
            others = f" (and {more} more)" if more else ""
            advice = ", or set strict to false and check the answer" if readable else ""
            what = f"{source.title}{place.rpartition('/')[2]} at {place} cannot be enforced"
            raise GrammarRefused(f"{what}: {told}{others}; change the schema{advice}", source.field, report)
    return payload, report


def _not_finite(request: GrammarRequest) -> list[str]:
    """The places of such numbers in its schemas."""
    return [
        path
        for source in _sources(request)
        for path, value in parts(source.schema, source.prefix)
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _never_ends(request: GrammarRequest, endless: Endless, limits: PromptLimitsConfig) -> GrammarRefused:
    """The refusal of what has no finite value, with the place in its schema or the rule of its grammar."""
    source = next((each for each in _sources(request) if each.makes(endless.grammar)), None)
    if source is None:
        return GrammarRefused(_never_ends_as_text(request.response_format, endless.rules), request.field)
    compiled = compile_schema(source.schema, strict=False, max_depth=limits.max_schema_depth)
    places = [path for name, path in compiled.locations.items() if name in endless.rules]
    place = "#" + next(iter(places), "")
    return GrammarRefused(
        f"{source.title}no finite value matches the schema at {place}: each needs another one inside, "
        "without end; do not require what leads back there, or add an alternative that ends",
        source.field,
        compiled.enforcement,
    )


def _never_ends_as_text(form: ResponseFormat | None, rules: list[str]) -> str:
    """The same for a grammar that was sent as text."""
    if isinstance(form, RegexFormat):
        return "no text matches the pattern; a class of it may be empty"
    name = "root" if isinstance(form, EbnfFormat) and rules[0] == "start" else rules[0]
    return f"no finite text matches rule {name!r} of the grammar; add an alternative that ends"


class _Source(msgspec.Struct, frozen=True, kw_only=True):
    """A schema of a request."""

    schema: Any
    is_strict: bool
    field: str
    # Name of the grammar that is made of it, and the beginning of those of its parts.
    grammar: str
    # Before its paths, where the request has several.
    prefix: str = ""
    # Begins a message about it.
    title: str = ""

    def makes(self, grammar: str) -> bool:
        """Whether the grammar is made of this schema."""
        return grammar == self.grammar or grammar.startswith(f"{self.grammar}_")


def _tool_sources(request: GrammarRequest) -> list[_Source]:
    return [
        _Source(
            schema=tool.parameters,
            is_strict=tool.strict,
            field=parameters_field(index),
            grammar=f"arguments_{index}",
            prefix=parameters_path(index),
            title=f"tool {tool.name!r}: ",
        )
        for index, tool in (request.tools.numbered() if request.tools is not None else ())
        if tool.parameters is not None
    ]


def _sources(request: GrammarRequest) -> list[_Source]:
    form, sources = request.response_format, _tool_sources(request)
    if isinstance(form, JsonSchemaFormat):
        sources.append(
            _Source(
                schema=_read(form.schema_json),
                is_strict=form.strict,
                field="response_format.json_schema",
                grammar="answer",
            )
        )
    return sources


def _lenient(request: GrammarRequest) -> GrammarRequest:
    """The same request, nothing of it strict."""
    form, rules = request.response_format, request.tools
    if isinstance(form, JsonSchemaFormat):
        form = JsonSchemaFormat(form.schema_json, strict=False)
    if rules is not None:
        tools = tuple(msgspec.structs.replace(tool, strict=False) for tool in rules.tools)
        rules = msgspec.structs.replace(rules, tools=tools)
    return msgspec.structs.replace(request, response_format=form, tools=rules)


def _is_readable(schema: Any) -> bool:
    """Whether an answer can be judged by the schema: not by one with a pattern that is none."""
    try:
        jsonschema_rs.validator_for(schema)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError):
        return False
    return True


def _repaired(grammars: list[Grammar], error: str) -> bool:
    """Rewrites the schemas among `grammars` so that `error` goes away, if there is a way."""
    changed = False
    for grammar in grammars:
        better = repair(grammar["json_schema"], error) if "json_schema" in grammar else None
        if better is not None:
            grammar["json_schema"] = better
            changed = True
    return changed


def _is_unsatisfiable(error: str) -> bool:
    return error.startswith("Unsatisfiable schema")


def _told(error: str, form: ResponseFormat | None) -> str:
    """The back end's error for the sender: without places and names of what was written for the back end."""
    lines = error.strip().splitlines() or ["the grammar cannot be compiled"]
    line = lines[0] if isinstance(form, LarkFormat) else _PLACE.sub("", lines[0])
    # The last line of a regular expression's error has the reason.
    detail = next((each for each in lines[1:] if each.startswith("error: ")), "")
    if detail:
        line = f"{line} {detail.removeprefix('error: ')}"
    if isinstance(form, RegexFormat) and line.startswith("invalid regex"):
        return f"{line}; patterns are those of Rust's regex: no look-around, back-references or \\b"
    if line.startswith(_OUT_OF_BOUNDS):
        return f"{line}: it needs more work than one token may cost; repeat and list less in it"
    if _is_unsatisfiable(line):
        return f"no value matches the schema ({line.removeprefix('Unsatisfiable schema: ')})"
    return line


def _grammars(
    request: GrammarRequest,
    limits: PromptLimitsConfig,
    token_ids: Mapping[str, int],
    left_out: Mapping[str, str] | None = None,
) -> tuple[list[Grammar], EnforcementReport | None]:
    answer: Grammar | None = None
    enforcement: EnforcementReport | None = None
    if request.response_format is not None:
        answer, enforcement = _answer(request.response_format, limits, left_out)
    if request.tools is not None:
        grammars, enforcement = tool_grammars(
            request.tools, answer, token_ids, limits.max_schema_depth, left_out
        )
    else:
        assert answer is not None
        grammars = [{"name": "answer", **answer}]
    # Harmony's messages say themselves what they are.
    is_harmony = request.tools is not None and request.tools.format == HARMONY
    if request.reasoning is not Reasoning.NONE and not is_harmony:
        form = REASONING[request.reasoning_format]
        form = form if request.tools is None else msgspec.structs.replace(form, answer_open="")
        grammars = [_reasoning_first(request.reasoning, form, grammars[0]["name"], token_ids), *grammars]
    return grammars, enforcement


def _unforced(grammars: list[Grammar], backend: Backend) -> list[Grammar]:
    """Text that spells a named token may come in other tokens, but the library forces tokens of its own
    choice, and refuses control tokens then. Where such text is asked for it forces nothing.
    """
    asked = [each for each in grammars if each["name"] not in ("tool_calls", "reasoning")]
    first = grammars[0]
    if not asked or not backend.spells_named_token(serialize(asked)):
        return grammars
    if "lark_grammar" in first:
        return [{**first, "lark_grammar": NO_FORCING + first["lark_grammar"]}, *grammars[1:]]
    start = {"name": "start", "lark_grammar": f"{NO_FORCING}start: @{first['name']}\n"}
    return [start, *grammars]


def _reasoning_first(
    reasoning: Reasoning, form: ReasoningForm, then: str, token_ids: Mapping[str, int]
) -> Grammar:
    """Free text up to the end of the reasoning block, then the grammar called `then`."""
    opens, closes = literal(form.open, token_ids), literal(form.close, token_ids)
    # Pieces that are spelled may begin a text with the space of their tokenizer.
    spelled = f"/[ \\n]?\\n?{re.escape(form.open)}/"
    opens = f"/\\n{{1,2}}/? {opens}" if opens.startswith("<[") else spelled
    if closes.startswith("<["):
        escaped = re.escape(form.close).replace("/", r"\/")
        lark = f"thoughts: TEXT? {closes} SPACE\nTEXT: /(?s:.+)/ & ~/(?s:.*{escaped}.*)/\n"
    else:
        lark = f"thoughts: until_close SPACE\nuntil_close[lazy]: /(?s:.*)/ {closes}\n"
    first = "thoughts" if reasoning is Reasoning.OPEN else f"({opens} thoughts)?"
    answer = f"@{then}"
    if form.answer_open:
        is_message = form is REASONING[HARMONY]
        tag = literal(form.answer_open, token_ids)
        answer = (
            f"{tag} {answer}"
            if is_message
            else f"({tag} {answer} {literal(form.answer_close, token_ids)} | {answer})"
        )
    return {"name": "reasoning", "lark_grammar": f"start: {first} {answer}\n{lark}SPACE: /[ \\n]{{0,4}}/\n"}


def _answer(
    form: ResponseFormat, limits: PromptLimitsConfig, left_out: Mapping[str, str] | None
) -> tuple[Grammar, EnforcementReport | None]:
    match form:
        case JsonObjectFormat():
            return {"json_schema": {"type": "object", "x-guidance": LAYOUT}}, None
        case JsonSchemaFormat():
            return _schema_answer(form, limits, left_out)
        case RegexFormat(pattern=pattern):
            return {"lark_grammar": f"start: ANSWER\nANSWER: /{_lark_pattern(pattern)}/\n"}, None
        case ChoiceFormat(options=options):
            alternatives = " | ".join(map(_lark_string, options))
            return {"lark_grammar": f"start: ANSWER\nANSWER: {alternatives}\n"}, None
        case LarkFormat(grammar=grammar):
            return {"lark_grammar": grammar}, None
        case EbnfFormat(grammar=grammar):
            return {"lark_grammar": gbnf_to_lark(grammar)}, None


def _lark_pattern(pattern: str, field: str = "response_format.regex") -> str:
    """Raises GrammarRefused for what the library would write as another pattern."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        problem = "the pattern ends with a backslash that escapes nothing; remove or double it"
        raise GrammarRefused(problem, field)
    if "\n" in pattern and _VERBOSE.search(pattern):
        # It would take line breaks for text, which are layout here, and comments would not end.
        raise GrammarRefused(
            "line breaks in a pattern with the flag x cannot be told apart; write it on one line", field
        )
    return str(llguidance.regex_to_lark(pattern, ""))


def _lark_string(text: str) -> str:
    # The library cannot read a DEL that is not escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _read(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        # Python's own also reads NaN and numbers beyond floating-point ones, and says better what is wrong.
        return json.loads(text)


def _schema_answer(
    form: JsonSchemaFormat, limits: PromptLimitsConfig, left_out: Mapping[str, str] | None
) -> tuple[Grammar, EnforcementReport]:
    field = "response_format.json_schema"
    try:
        schema = _read(form.schema_json)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise GrammarRefused(f"the schema is not valid JSON: {reason}", field) from error
    try:
        compiled = compile_schema(
            schema, strict=form.strict, max_depth=limits.max_schema_depth, left_out=left_out
        )
    except SchemaRefused as refused:
        raise GrammarRefused(str(refused), field, refused.enforcement) from refused
    return compiled.grammar, compiled.enforcement
