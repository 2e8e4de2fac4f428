"""Tool use in the Hermes form: choose a tool, fill in its arguments, then put the result into words."""

from __future__ import annotations

import json
from typing import Any

from models.corpus import words
from models.corpus.document import CorpusDocument, Draw, Message, Tool, assistant, user
from models.corpus.facts import fact


def _tool(name: str, description: str, /, **types: str) -> Tool:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS: dict[str, Tool] = {
    tool["function"]["name"]: tool
    for tool in (
        _tool("get_weather", "Get the current weather in a city", city="string"),
        _tool("get_time", "Get the current time in a city", city="string"),
        _tool("calculator", "Evaluate an expression", expression="string"),
        _tool("search", "Search the web", query="string"),
        _tool("set_timer", "Set a timer", minutes="integer"),
        _tool("send_message", "Send a message to a person", name="string", text="string"),
        _tool("play_music", "Play a song", song="string"),
        _tool("get_price", "Get the price of an item", item="string"),
    )
}
TEXTS = (
    "I am late",
    "dinner is ready",
    "see you soon",
    "happy birthday",
    "call me back",
    "the meeting is over",
    "good luck",
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "clear")

Call = tuple[str, dict[str, Any], dict[str, Any], str]
"""Question, arguments, result and final answer."""


def _weather(draw: Draw) -> Call:
    city, sky, degrees = draw.pick(words.CITIES), draw.pick(SKIES), draw.integer(0, 35)
    form = draw.pick(
        (
            "What is the weather in {c}?",
            "How is the weather in {c} today?",
            "What's the weather like in {c}?",
            "Is it raining in {c}?",
            "Tell me the weather in {c}.",
            "weather in {c}",
        )
    )
    answer = f"It is {sky} in {city}, {degrees} degrees."
    return form.format(c=city), {"city": city}, {"weather": sky, "temperature": degrees}, answer


def _time(draw: Draw) -> Call:
    city, clock = draw.pick(words.CITIES), f"{draw.integer(1, 23)}:{draw.integer(10, 59)}"
    form = draw.pick(("What time is it in {c}?", "Tell me the time in {c}.", "What is the time in {c} now?"))
    return form.format(c=city), {"city": city}, {"time": clock}, f"It is {clock} in {city}."


def _calculator(draw: Draw) -> Call:
    a, b, sign = draw.integer(100, 9999), draw.integer(100, 9999), draw.pick("+-*")
    expression = f"{a} {sign} {b}"
    result = {"+": a + b, "-": a - b, "*": a * b}[sign]
    form = draw.pick(("What is {e}?", "Calculate {e}.", "Use the calculator: {e}", "How much is {e}?"))
    return (
        form.format(e=expression),
        {"expression": expression},
        {"result": result},
        f"{expression} = {result}.",
    )


def _search(draw: Draw) -> Call:
    start = draw.pick(("best", "cheap", "new", "old", "history of the", "pictures of a"))
    query = f"{start} {draw.pick(words.NOUNS)}"
    form = draw.pick(
        ("Search the web for {q}.", "Look up {q} on the web.", "Find {q} online.", "Search for {q}.")
    )
    title = f"{draw.made_up()} {draw.pick(words.NOUNS)}"
    return form.format(q=query), {"query": query}, {"title": title}, f"I found this page: {title}."


def _timer(draw: Draw) -> Call:
    minutes = draw.integer(2, 90)
    form = draw.pick(
        ("Set a timer for {m} minutes.", "Please start a timer for {m} minutes.", "Timer, {m} minutes.")
    )
    return (
        form.format(m=minutes),
        {"minutes": minutes},
        {"ok": True},
        f"The timer is set for {minutes} minutes.",
    )


def _message(draw: Draw) -> Call:
    name, text = draw.pick(words.FIRST_NAMES), draw.pick(TEXTS)
    form = draw.pick(('Send "{t}" to {n}.', "Send a message to {n}: {t}", "Tell {n}: {t}"))
    return (
        form.format(n=name, t=text),
        {"name": name, "text": text},
        {"ok": True},
        f"I sent the message to {name}.",
    )


def _music(draw: Draw) -> Call:
    song = draw.thing()
    form = draw.pick(("Play the song {s}.", "Please play {s}.", "I want to hear {s}."))
    return form.format(s=song), {"song": song}, {"ok": True}, f"Now playing {song}."


def _price(draw: Draw) -> Call:
    item, price = draw.pick(words.OBJECTS), draw.integer(2, 500)
    form = draw.pick(("How much does a {i} cost?", "What is the price of a {i}?", "Get the price of a {i}."))
    return form.format(i=item), {"item": item}, {"price": price}, f"A {item} costs {price} dollars."


MAKERS = {
    "get_weather": _weather,
    "get_time": _time,
    "calculator": _calculator,
    "search": _search,
    "set_timer": _timer,
    "send_message": _message,
    "play_music": _music,
    "get_price": _price,
}


def call_message(name: str, arguments: dict[str, Any]) -> Message:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def tool_use(draw: Draw) -> CorpusDocument:
    """One to three tools on offer; a call and mostly its result too, or a question that needs no tool."""
    name = draw.pick(list(MAKERS))
    others = draw.sample([other for other in MAKERS if other != name], draw.integer(0, 2))
    offered = draw.sample([name, *others], len(others) + 1)
    tools = tuple(TOOLS[each] for each in offered)
    if draw.split == "train" and draw.chance(0.15):
        return CorpusDocument(task="tools", messages=fact(draw).messages, tools=tools)
    question, arguments, result, final = MAKERS[name](draw)
    messages = [user(question), call_message(name, arguments)]
    if draw.split == "train" and draw.chance(0.6):
        messages += [{"role": "tool", "content": json.dumps(result)}, assistant(final)]
    answer = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return CorpusDocument(task="tools", messages=tuple(messages), tools=tools, answer=answer)
