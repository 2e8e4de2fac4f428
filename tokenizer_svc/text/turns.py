"""Nothing that a client says may vanish: which turns a template leaves out, and other ways to put them.

Templates write the roles that their authors thought of. Many know one system message, and that in front; some
drop what a developer says, or what stands beside a call. Here turns are the dictionaries that a template
reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from contract.chat import Role
from contract.formats import THINK_CLOSE

Turns = list[dict[str, Any]]
_INSTRUCTIONS = frozenset({Role.SYSTEM.value, Role.DEVELOPER.value})
# Shorter texts of these roles are looked for by a trial: a template's own text may hold such words.
_LONG_ENOUGH = 16
_SELDOM_SHORT = _INSTRUCTIONS | {Role.TOOL.value}


def all_written(turns: Turns, rendered: str) -> bool:
    """Whether every text stands in the prompt, one after the other. False also where that is uncertain, as
    with templates that change a text or the order of turns.
    """
    position = 0
    for turn in turns:
        text = _visible(turn)
        if not text:
            continue
        found = rendered.find(text, position)
        if found < 0 or (turn["role"] in _SELDOM_SHORT and len(text) < _LONG_ENOUGH):
            return False
        position = found + len(text)
    return True


def missing(turns: Turns, render: Callable[[Turns], str]) -> list[int]:
    """Indexes of the turns of whose text the template leaves out a part: it is given texts with marks around
    them, which stand nowhere else. `render` may raise; then nothing is known.
    """
    said = [index for index, turn in enumerate(turns) if _visible(turn)]
    trial = list(turns)
    for index in said:
        trial[index] = turns[index] | {"content": _marked(turns[index], index)}
    rendered = render(trial).lower()
    return [index for index in said if not all(mark in rendered for mark in _marks(index))]


def absent(turns: Turns, rendered: str) -> list[int]:
    """Indexes of the turns whose text is nowhere in the prompt, as it is or as JSON has it."""
    return [
        index
        for index, turn in enumerate(turns)
        if (text := _visible(turn)) not in rendered
        and json.dumps(text, ensure_ascii=False)[1:-1] not in rendered
    ]


def other_ways(turns: Turns) -> Iterator[Turns]:
    """The same conversation in other forms, those first that change least."""
    made = [turns]
    for way in (_results_named, _values_as_texts, _first_merged, _later_folded, _all_folded, _calls_apart):
        changed = way(turns)
        if changed not in made:
            made.append(changed)
            yield changed


def _results_named(turns: Turns) -> Turns:
    """Results say which tool they are of, as their calls do."""
    calls = [call for turn in turns for call in turn.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls}
    return [
        turn | {"name": names[turn["tool_call_id"]]}
        if "name" not in turn and turn.get("tool_call_id") in names
        else turn
        for turn in turns
    ]


def _values_as_texts(turns: Turns) -> Turns:
    """Arguments of calls are texts, for templates that put them together."""
    return [
        turn | {"tool_calls": [_with_texts(call) for call in turn["tool_calls"]]}
        if turn.get("tool_calls")
        else turn
        for turn in turns
    ]


def _with_texts(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    if not isinstance(function["arguments"], dict):
        return call
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in function["arguments"].items()
    }
    return call | {"function": function | {"arguments": texts}}


def _marks(index: int) -> tuple[str, str]:
    return f"probe-{index}-begins", f"probe-{index}-ends"


def _marked(turn: dict[str, Any], index: int) -> str:
    text, visible = turn.get("content") or "", _visible(turn)
    begins, ends = _marks(index)
    start = text.rfind(visible)
    return f"{text[:start]}{begins} {visible} {ends}{text[start + len(visible) :]}"


def _visible(turn: dict[str, Any]) -> str:
    """What has to appear of a turn's text: of an assistant's, what follows its thoughts, as every template
    that knows thoughts leaves old ones out.
    """
    text = turn.get("content") or ""
    if turn["role"] == Role.ASSISTANT.value:
        text = text.rpartition(THINK_CLOSE)[2]
    return str(text.strip())


def _first_merged(turns: Turns) -> Turns:
    """All instructions in front become one system message."""
    length = 0
    while length < len(turns) and turns[length]["role"] in _INSTRUCTIONS:
        length += 1
    rest = turns[length:]
    return [_system(turns[:length]), *rest] if length else turns


def _later_folded(turns: Turns) -> Turns:
    """And those between other turns open what the user says next."""
    merged = _first_merged(turns)
    if merged and merged[0]["role"] == Role.SYSTEM.value:
        return [merged[0], *_all_folded(merged[1:])]
    return _all_folded(merged)


def _all_folded(turns: Turns) -> Turns:
    """Instructions open what the user says next; after the user's last turn they end it."""
    made: Turns = []
    waiting: Turns = []
    for turn in turns:
        if turn["role"] in _INSTRUCTIONS:
            waiting.append(turn)
        elif turn["role"] == Role.USER.value and waiting:
            made.append(turn | {"content": _joined([*waiting, turn])})
            waiting = []
        else:
            made.append(turn)
    if not waiting:
        return made
    last = max((at for at, turn in enumerate(made) if turn["role"] == Role.USER.value), default=-1)
    if last < 0:
        return [{"role": Role.USER.value, "content": _joined(waiting)}, *made]
    made[last] = made[last] | {"content": _joined([made[last], *waiting])}
    return made


def _calls_apart(turns: Turns) -> Turns:
    """What an assistant said beside a call becomes a turn before the call."""
    made: Turns = []
    for turn in turns:
        if turn.get("tool_calls") and _visible(turn):
            made += [{"role": turn["role"], "content": turn["content"]}, turn | {"content": ""}]
        else:
            made.append(turn)
    return made


def _system(turns: Turns) -> dict[str, Any]:
    # A name stays where one instruction becomes a system message as it is.
    return turns[0] | {"role": Role.SYSTEM.value, "content": _joined(turns)}


def _joined(turns: Turns) -> str:
    return "\n\n".join(turn["content"] for turn in turns if turn["content"])
