"""Cases as a person writes them: a JSON object a line, checked before anything is asked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec

from runtime.errors import ConfigError
from services.gate.cases import CHAT, COMPLETIONS, Case, LayerName
from services.gate.language import LANGUAGES

# Which checks a layer's lines may name.
CHECKS: Mapping[str, tuple[str, ...]] = {
    "task": ("exact", "contains", "regex", "json", "numeric", "code", "judge"),
    "structure": ("schema", "tool"),
    "behaviour": ("refusal", "language", "format"),
}


class CaseLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. `prompt` is one user's message."""

    id: str = ""
    # What several lines share that ask the same in other words; its own when empty.
    question: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    # Of the intrinsic layer.
    text: str | None = None
    check: str = ""
    answer: Any = msgspec.UNSET
    tools: list[dict[str, Any]] | None = None
    # Of the check "schema": whether the server is told the schema, or the prompt says it all.
    enforced: bool = True
    tolerance: float = 0.0
    max_tokens: int | None = None


def read_lines(path: Path, layer: LayerName) -> list[CaseLine]:
    """The lines of a file; raises ConfigError that names file, line and remedy."""
    try:
        rows = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; [{layer}] file is relative to the suite") from error
    found = []
    for number, row in enumerate(rows, 1):
        if not row.strip():
            continue
        where = f"{path}:{number}"
        try:
            line = msgspec.json.decode(row, type=CaseLine)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where}: {error}; a line is one JSON object") from error
        check_line(line, layer, where)
        found.append(msgspec.structs.replace(line, id=line.id or f"{path.name}:{number}"))
    if not found:
        raise ConfigError(f"{path}: it has no cases; write one JSON object a line")
    names = [line.id for line in found]
    twice = (
        next((name for name in names if names.count(name) > 1), None)
        if len(set(names)) < len(names)
        else None
    )
    if twice is not None:
        raise ConfigError(f"{path}: two cases have the id {twice!r}; give each its own")
    return found


def check_line(line: CaseLine, layer: LayerName, where: str) -> None:
    """Raises ConfigError for a line that could not be judged."""
    if layer == "intrinsic":
        if not line.text or len(line.text) < 2:
            raise ConfigError(f"{where}: text is missing; give what perplexity is measured on")
        return
    if (line.prompt is None) == (line.messages is None):
        raise ConfigError(f"{where}: give either prompt or messages")
    if layer == "tokens":
        return
    if line.check not in CHECKS[layer]:
        raise ConfigError(f"{where}: check {line.check!r} is none of [{layer}]: {', '.join(CHECKS[layer])}")
    if line.answer is msgspec.UNSET:
        raise ConfigError(f"{where}: the case has no answer; say in `answer` what is right")
    if problem := _ANSWERS[line.check](line):
        raise ConfigError(f"{where}: answer of the check {line.check!r}: {problem}")


def _is_text(line: CaseLine) -> str:
    return "" if isinstance(line.answer, str) and line.answer else "expected a text"


def _is_texts(line: CaseLine) -> str:
    texts = line.answer if isinstance(line.answer, list) else [line.answer]
    return "" if texts and all(isinstance(each, str) and each for each in texts) else "expected text or texts"


def _is_pattern(line: CaseLine) -> str:
    if problem := _is_text(line):
        return problem
    try:
        re.compile(line.answer)
    except re.error as error:
        return f"not a regular expression: {error}"
    return ""


def _is_number(line: CaseLine) -> str:
    is_one = isinstance(line.answer, int | float) and not isinstance(line.answer, bool)
    return "" if is_one else "expected a number"


def _is_schema(line: CaseLine) -> str:
    if not isinstance(line.answer, dict):
        return "expected a JSON schema"
    try:
        jsonschema_rs.validator_for(line.answer)
    except (jsonschema_rs.ValidationError, ValueError) as error:
        return f"not a JSON schema: {str(error).splitlines()[0]}"
    return ""


def _is_call(line: CaseLine) -> str:
    names = [tool.get("function", {}).get("name") for tool in line.tools or ()]
    if not names:
        return "give the tools that are offered in `tools`"
    if line.answer is None:
        return ""
    if not isinstance(line.answer, dict) or not line.answer.keys() <= {"name", "arguments"}:
        return 'expected {"name": …, "arguments": …}, or null where no tool should be called'
    if line.answer.get("name") not in names:
        return f"no tool is named {line.answer.get('name')!r}; `tools` has {', '.join(map(str, names))}"
    return ""


def _is_bool(line: CaseLine) -> str:
    return "" if isinstance(line.answer, bool) else "expected true (it must refuse) or false (it must not)"


def _is_language(line: CaseLine) -> str:
    return "" if line.answer in LANGUAGES else f"expected one of {', '.join(LANGUAGES)}"


_ANSWERS: Mapping[str, Callable[[CaseLine], str]] = {
    "exact": _is_text,
    "contains": _is_texts,
    "regex": _is_pattern,
    "json": lambda _: "",
    "numeric": _is_number,
    "code": _is_text,
    "judge": _is_text,
    "schema": _is_schema,
    "tool": _is_call,
    "refusal": _is_bool,
    "language": _is_language,
    "format": _is_pattern,
}


def to_cases(lines: Sequence[CaseLine], layer: LayerName, settings: Any, seed: int) -> list[Case]:
    """Requests of the lines: greedy, but for the tokens layer, which draws with a seed of each case."""
    if layer == "intrinsic":
        return [_text_case(line) for line in lines]
    return [_asked(line, layer, settings, seed) for line in lines]


def _text_case(line: CaseLine) -> Case:
    body = {"prompt": line.text, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    return Case(
        id=line.id,
        layer="intrinsic",
        question=line.question or line.id,
        path=COMPLETIONS,
        body=body,
        check="perplexity",
    )


def continued(line: CaseLine) -> Case:
    """The last quarter of a text, word by word after the others: each token is foreseen from what is kept of
    these.
    """
    text = line.text or ""
    cut = text.rfind(" ", 0, len(text) * 3 // 4)
    if cut <= 0:
        raise ConfigError(f"{line.id}: its text has no space to cut it at; give a longer one")
    rest = text[cut:]
    body = {"prompt": text[:cut], "max_tokens": len(rest.encode()) + 1, "temperature": 0, "logprobs": 1}
    return Case(
        id=line.id,
        layer="intrinsic",
        question=line.question or line.id,
        path=COMPLETIONS,
        body=body | {"guided_choice": [rest]},
        check="continued",
        answer=rest,
    )


def _asked(line: CaseLine, layer: LayerName, settings: Any, seed: int) -> Case:
    body: dict[str, Any] = {
        "messages": line.messages or [{"role": "user", "content": line.prompt}],
        "max_tokens": line.max_tokens or settings.max_tokens,
        "temperature": 0,
    }
    if layer == "tokens":
        drawn = int(hashlib.sha256(f"{seed} {line.id}".encode()).hexdigest()[:7], 16)
        body |= {"temperature": settings.temperature, "seed": drawn, "logprobs": True}
    if line.tools:
        body["tools"] = line.tools
    if line.check == "schema" and line.enforced:
        schema = {"name": "answer", "strict": True, "schema": line.answer}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return Case(
        id=line.id,
        layer=layer,
        question=line.question or line.id,
        path=CHAT,
        body=body,
        check=line.check or "tokens",
        answer=None if line.answer is msgspec.UNSET else line.answer,
        tolerance=line.tolerance,
    )
