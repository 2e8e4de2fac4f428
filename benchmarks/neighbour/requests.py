"""Where attacks go, how one request is sent, and the large bodies that are sent."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

MEGABYTES_16 = 16 * 1024 * 1024 - 1024
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CHAT_CALL = "/millrace.inference.v1.InferenceService/Chat"


class Target(NamedTuple):
    """Where the edge listens, and who attacks it."""

    host: str
    port: int
    key: str
    model: str

    def authority(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


Attack = Callable[[Target, Counter[str]], Awaitable[None]]
# Makes of a target the path and the body that are sent.
Body = Callable[[Target], tuple[str, bytes]]


def request_head(target: Target, path: str, length: int | None, *, key: bool = True, more: str = "") -> bytes:
    """Of a POST; its body is in chunks where there is no length, and `more` are header lines."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    credentials = f"authorization: Bearer {target.key}\r\n" if key else ""
    return (
        f"POST {path} HTTP/1.1\r\nhost: x\r\n{credentials}content-type: application/json\r\n{more}"
        f"{framing}\r\n\r\n"
    ).encode()


def http2_fields(
    target: Target, path: str, *more: tuple[str, str], key: bool = True
) -> list[tuple[str, str]]:
    """The same for HTTP/2."""
    credentials = [("authorization", f"Bearer {target.key}")] if key else []
    pseudo = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", target.authority())]
    return [*pseudo, *credentials, *more]


async def status(reader: asyncio.StreamReader) -> str:
    """Of an answer that begins; "closed" where there is none."""
    line = await reader.readline()
    return line.split()[1].decode() if line else "closed"


async def sent(target: Target, request: bytes, outcomes: Counter[str], *, reads: bool = True) -> None:
    """One request on a connection of its own, read to its end."""
    writer = None
    try:
        reader, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(request)
        outcomes[await status(reader)] += 1
        while reads and await reader.read(1 << 20):
            pass
    except (OSError, asyncio.IncompleteReadError):
        outcomes["connection lost"] += 1
    finally:
        if writer is not None:
            writer.close()


async def repeatedly(width: int, once: Callable[[], Awaitable[None]]) -> None:
    """Does it again and again, so many at a time."""

    async def one_after_the_other() -> None:
        while True:
            await once()

    await asyncio.gather(*(one_after_the_other() for _ in range(width)))


def posted(make: Body, *, width: int = 4, more: str = "") -> Attack:
    """Sends one body again and again, so many at a time."""

    async def attack(target: Target, outcomes: Counter[str]) -> None:
        path, body = make(target)
        request = request_head(target, path, len(body), more=f"connection: close\r\n{more}") + body
        await repeatedly(width, lambda: sent(target, request, outcomes))

    return attack


def _list(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def chat_body(target: Target, rest: bytes = b"", messages: bytes | None = None) -> tuple[str, bytes]:
    """A chat of one message, or of these, with `rest` after them."""
    messages = messages or b'[{"role":"user","content":"Hi"}]'
    return CHAT, b'{"model":"%b","messages":%b%b}' % (target.model.encode(), messages, rest)


def _completion(target: Target, prompt: bytes, rest: bytes = b"") -> tuple[str, bytes]:
    return COMPLETIONS, b'{"model":"%b","prompt":%b%b}' % (target.model.encode(), prompt, rest)


def json_fields(**fields: Any) -> bytes:
    """The end of a JSON object that has begun."""
    return b"," + json.dumps(fields).encode()[1:-1]


_TURN = b'{"role":"user","content":"a"}'
_PART = b'{"type":"text","text":"a"}'
_CALL = b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'

BODIES: Mapping[str, Body] = {
    "detokenize of 8 million ids": lambda target: ("/detokenize", b'{"tokens":%b}' % _list(b"1", 7_900_000)),
    "tokenize of 400,000 messages": lambda target: (
        "/tokenize",
        b'{"messages":%b}' % _list(_TURN, 400_000),
    ),
    "500,000 messages": lambda target: chat_body(target, messages=_list(_TURN, 500_000)),
    "300,000 parts": lambda target: chat_body(
        target, messages=b'[{"role":"user","content":%b}]' % _list(_PART, 300_000)
    ),
    "a prompt of 3 million ids": lambda target: _completion(target, _list(b"5", 3_000_000)),
    "allowed_token_ids of 3 million": lambda target: chat_body(
        target, b',"allowed_token_ids":' + _list(b"5", 3_000_000)
    ),
    "stop_token_ids of 3 million": lambda target: chat_body(
        target, b',"stop_token_ids":' + _list(b"5", 3_000_000)
    ),
    "14 MB of chat_template_kwargs": lambda target: chat_body(
        target, b',"chat_template_kwargs":{"a":%b}' % _list(b'{"b":[1]}', 1_400_000)
    ),
    "14 MB of documents": lambda target: chat_body(
        target, b',"documents":' + _list(b'{"title":"a","text":"b"}', 560_000)
    ),
    "700,000 entries of metadata": lambda target: chat_body(
        target, b',"metadata":{%b}' % b",".join(b'"k%d":"v"' % index for index in range(700_000))
    ),
    "100,000 tool calls": lambda target: chat_body(
        target, messages=b'[{"role":"assistant","tool_calls":%b},%b]' % (_list(_CALL, 100_000), _TURN)
    ),
    "a million choices": lambda target: chat_body(
        target, b',"guided_choice":[%b]' % b",".join(b'"c%d"' % index for index in range(1_000_000))
    ),
    "a model name of 4 MB": lambda target: chat_body(target._replace(model="m" * 4_000_000)),
    "nesting of 100,000": lambda target: chat_body(
        target, b',"guided_json":' + b'{"items":' * 100_000 + b"{}" + b"}" * 100_000
    ),
    "a text of 16 MB": lambda target: chat_body(
        target, messages=b'[{"role":"user","content":"%b"}]' % (b"a b, c" * (MEGABYTES_16 // 6 - 64))
    ),
    "60 texts of 4 MB": lambda target: chat_body(
        target, messages=b'[{"role":"user","content":"%b"}]' % (b"a b, c" * 700_000)
    ),
    # Agents send so much with every turn: ordinary, and many at once all the same.
    "60 texts of 300 KB": lambda target: chat_body(
        target, json_fields(max_tokens=1), b'[{"role":"user","content":"%b"}]' % (b"a b, c" * 50_000)
    ),
    "128 prompts x n = 128": lambda target: _completion(
        target,
        _list(b'"The rain in Spain"', 128),
        json_fields(n=128, max_tokens=64, temperature=1.0, ignore_eos=True),
    ),
    "best_of = 128 x 16 prompts": lambda target: _completion(
        target,
        _list(b'"The rain in Spain"', 16),
        json_fields(best_of=128, max_tokens=64, temperature=1.0, ignore_eos=True),
    ),
    "n = 128 with log-probabilities": lambda target: chat_body(
        target,
        json_fields(n=128, max_completion_tokens=1000, logprobs=True, top_logprobs=20, ignore_eos=True),
    ),
    "n = 128 with its tokens' log-probabilities": lambda target: chat_body(
        target, json_fields(n=128, max_completion_tokens=1000, logprobs=True, ignore_eos=True)
    ),
    "64 votes of eight samples": lambda target: chat_body(
        target,
        json_fields(
            max_tokens=48,
            temperature=1.0,
            test_time={"strategy": "self_consistency", "samples": 8, "budget_tokens": 400},
        ),
        b'[{"role":"user","content":"What is 27 + 45?"}]',
    ),
    "64 searches of eight steps": lambda target: chat_body(
        target,
        json_fields(
            max_tokens=48,
            temperature=1.0,
            test_time={"strategy": "search", "samples": 8, "budget_tokens": 400, "delimiter": " "},
        ),
        b'[{"role":"user","content":"What is 27 + 45?"}]',
    ),
    "prompts as long as the context": lambda target: _completion(
        target, b"[" + b",".join(b"%d" % random.randrange(10, 2000) for _ in range(4000)) + b"]"
    ),
}
WIDTHS = {
    "60 texts of 4 MB": 60,
    "60 texts of 300 KB": 60,
    "best_of = 128 x 16 prompts": 8,
    "64 votes of eight samples": 64,
    "64 searches of eight steps": 64,
    "prompts as long as the context": 32,
}
