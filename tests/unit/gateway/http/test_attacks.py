"""Smaller forms of attacks: each is refused by name before it is parsed, and nothing waits for it."""

from __future__ import annotations

import asyncio
import gzip
import itertools
from typing import Any

import pytest

from gateway.faces import bodies
from gateway.intake import intake as intake_module
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

CHAT = "/v1/chat/completions"
TURN = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": "a" * 40}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
# A body is large beyond 64 KB: these are.
LIMITS = {"gateway": {"request": {"max_values": 1000, "max_token_ids": 5000, "max_depth": 100}}}


def nested(levels: int) -> Any:
    value: Any = "a" * 70_000
    for _ in range(levels):
        value = [value]
    return value


ATTACKS: dict[str, tuple[str, dict[str, Any], str]] = {
    "ids to decode": ("/detokenize", {"tokens": [1] * 40_000}, "tokens"),
    "messages to encode": ("/tokenize", {"messages": [TURN] * 3000}, "messages"),
    "messages": (CHAT, {"messages": [TURN] * 3000}, "messages"),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 1000}]}, "messages"),
    "tool calls": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 1000}]}, "messages"),
    "ids of a prompt": ("/v1/completions", {"prompt": [5] * 40_000}, "prompt"),
    "allowed ids": (CHAT, {"messages": [TURN], "allowed_token_ids": [5] * 40_000}, "allowed_token_ids"),
    "stop ids": (CHAT, {"messages": [TURN], "stop_token_ids": [5] * 40_000}, "stop_token_ids"),
    "options": (
        CHAT,
        {"messages": [TURN], "chat_template_kwargs": {"a": [{"b": 1}] * 9000}},
        "chat_template_kwargs",
    ),
    "documents": (CHAT, {"messages": [TURN], "documents": [{"title": "a" * 60}] * 1100}, "documents"),
    "metadata": (
        CHAT,
        {"messages": [TURN], "metadata": {f"k{at}": "v" * 20 for at in range(3000)}},
        "metadata",
    ),
    "choices": (
        CHAT,
        {"messages": [TURN], "guided_choice": [f"c{at:060}" for at in range(1100)]},
        "guided_choice",
    ),
    "nesting": (CHAT, {"messages": [TURN], "guided_json": {"a": nested(150)}}, "guided_json"),
}


@pytest.mark.parametrize(("path", "body", "field"), ATTACKS.values(), ids=ATTACKS)
async def test_too_much_is_refused_by_its_field_before_it_is_parsed(
    path: str, body: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parse(*_: object) -> None:
        pytest.fail("it was parsed")

    async with deployed(tables=LIMITS) as stack:
        monkeypatch.setattr(bodies, "decode_known", parse)
        response = await stack.http.post(path, json={"model": "tiny", **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert "more than" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": [TURN] * 3}, "3 messages; the limit is 2"),
        ({"messages": [{"role": "user", "content": [PART] * 4}]}, "4 parts; the limit is 3"),
        (
            {"messages": [TURN, {"role": "assistant", "tool_calls": [CALL] * 3}]},
            "3 tool calls; the limit is 2",
        ),
        (
            {
                "messages": [TURN],
                "tools": [{"type": "function", "function": {"name": f"f{at}"}} for at in range(2)],
            },
            "2 tools; the limit is 1",
        ),
        ({"messages": [TURN], "n": 9}, "n: 9 answers; the limit is 8 answers in all: ask for fewer"),
        ({"messages": [TURN], "best_of": 9}, "the limit is 8 answers"),
        ({"messages": [TURN], "stop_token_ids": [1] * 6}, "6 token ids; the limit is 5"),
    ],
)
async def test_limits_of_small_requests_are_the_configured_ones(body: dict[str, Any], message: str) -> None:
    limits = {"max_messages": 2, "max_parts": 3, "max_tool_calls": 2, "max_tools": 1}
    limits |= {"max_answers": 8, "max_token_ids": 5}
    async with deployed(tables={"gateway": {"request": limits}}) as stack:
        response = await stack.http.post(CHAT, json={"model": "tiny", "temperature": 1.0, **body})
        assert response.status_code == 400
        assert message in response.json()["error"]["message"]


async def test_answers_of_all_prompts_together_are_bounded() -> None:
    async with deployed() as stack:
        body = {"model": "tiny", "prompt": ["a"] * 128, "n": 128, "temperature": 1.0}
        error = (await stack.http.post("/v1/completions", json=body)).json()["error"]
        assert error["param"] == "n"
        assert "128 prompts with 128 answers each" in error["message"]


async def test_what_a_client_sent_is_echoed_in_parts_only() -> None:
    async with deployed() as stack:
        for body in ({"model": "m" * 60_000}, {"model": "tiny", "x" * 60_000: 1}):
            response = await stack.http.post(CHAT, json={"messages": [TURN], **body})
            assert response.status_code in (400, 404)
            assert len(response.content) < 4096


async def test_a_packed_body_is_refused_before_it_is_read() -> None:
    async with deployed() as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{CONTEXT_HEADER}: {signed_context()}\r\n"
            f"content-encoding: gzip\r\ncontent-length: 200000\r\n\r\n"
        )
        writer.write(head.encode() + gzip.compress(b" " * 10_000_000)[:100])
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"content-encoding" in answer
        writer.close()


async def test_a_large_body_is_worked_on_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "SLICE_S", 0.0)
    order: list[str] = []
    async with deployed() as stack:
        feed = bodies.BodyShape.feed

        def noted(shape: bodies.BodyShape, data: bytes) -> None:
            order.append("slice")
            feed(shape, data)

        monkeypatch.setattr(bodies.BodyShape, "feed", noted)

        async def count_turns() -> None:
            while True:
                order.append("turn")
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count_turns())
        await stack.http.post("/detokenize", json={"tokens": [1] * 100_000})
        counting.cancel()
    slices = [at for at, what in enumerate(order) if what == "slice"]
    assert len(slices) > 20
    # Between two slices the loop has gone round.
    assert all("turn" in order[at:later] for at, later in itertools.pairwise(slices))


async def refused_body(stack: Deployment, num_bytes: int) -> tuple[int, str]:
    text = "a" * num_bytes
    response = await stack.chat(messages=[{"role": "user", "content": text}])
    return response.status_code, response.json()["error"]["reason"]


async def test_bytes_of_bodies_that_never_end_are_bounded_by_tenant() -> None:
    limits = {"gateway": {"request": {"max_held_bytes": 1_200_000}}}
    async with deployed(tables=limits) as stack:
        writers = []
        for _ in range(2):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port)
            head = (
                f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{CONTEXT_HEADER}: {signed_context()}\r\n"
                "content-length: 150000\r\n\r\n"
            )
            writer.write(head.encode() + b" " * 90_000)
            await writer.drain()
            writers.append(writer)
        shares = stack.gateway._intake._held
        while shares.of.get("acme", 0) < 540_000:
            await asyncio.sleep(0.001)
        assert await refused_body(stack, 100_000) == (429, "QUEUE_LIMIT_EXCEEDED")
        for writer in writers:
            writer.close()
        while shares.of:
            await asyncio.sleep(0.001)
        # There is room for it again.
        assert await refused_body(stack, 100_000) == (400, "CONTEXT_LENGTH_EXCEEDED")


async def test_an_answer_whose_client_does_not_read_is_ended_with_the_reason() -> None:
    engine = ScriptedEngine(reply=lambda _s, _c: encode("x" * 60_000), max_model_len=100_000)
    engine.tokens_per_step = 1
    limits = {"gateway": {"request": {"max_unread": 1000}}}
    async with deployed(engine, tables=limits) as stack:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.http.port, limit=1024)
        body = (
            b'{"model":"tiny","stream":true,"logprobs":true,"top_logprobs":5,"max_tokens":50000,'
            b'"messages":[{"role":"user","content":"hi"}]}'
        )
        head = (
            f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{CONTEXT_HEADER}: {signed_context()}\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        await reader.readuntil(b"data: ")
        # Its end is settled once it can be told, and the engine knows at once.
        while not engine.cancels:
            await asyncio.sleep(0.01)
        rest = b""
        while b"max_unread" not in rest:
            piece = await reader.read(1 << 16)
            assert piece, rest[-500:]
            rest = rest[-4096:] + piece
        assert b"does not read its stream" in rest
        writer.close()
