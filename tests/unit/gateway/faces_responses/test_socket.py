"""The WebSocket mode of the Responses API through a foreign client, against the specification's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openresponses_types import types as spec
from sqlalchemy import func, select
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gateway.auth.directory import hash_key
from gateway.ledger.tables import REQUESTS, open_ledger
from observability.emit import names
from observability.emit.names import Metric
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.faces_responses.test_responses import (
    ADD,
    CALL,
    EVENTS,
    SPEC_NAMES,
    THINKS,
    events,
    roles,
    says,
    without_moments,
)
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
LONG = "It is four, and it was four yesterday. " * 40
KEY = "a key of at least thirty-two characters"


@asynccontextmanager
async def serving(
    text: str = "It is 4.", engine: ScriptedEngine | None = None, **tables: Any
) -> AsyncIterator[Deployment]:
    async with deployed(engine or ScriptedEngine(reply=says(text)), tables=tables) as stack:
        yield stack


def opened(stack: Deployment, request_id: str = "socket", tenant: str = "acme", **options: Any) -> connect:
    return connect(
        f"ws://127.0.0.1:{stack.gateway.http.port}/v1/responses",
        additional_headers={CONTEXT_HEADER: signed_context(request_id, tenant=tenant)},
        **options,
    )


async def send(socket: ClientConnection, **event: Any) -> None:
    await socket.send(json.dumps({"type": "response.create", "model": "tiny", "input": "hi", **event}))


async def next_event(socket: ClientConnection) -> dict[str, Any]:
    text = await socket.recv()
    assert isinstance(text, str)
    event: dict[str, Any] = json.loads(text)
    kind = SPEC_NAMES.get(event["type"], event["type"])
    if "status" in event:
        spec.WebSocketErrorEvent.model_validate(event)
    else:
        EVENTS[kind].model_validate({**event, "type": kind})
    return event


async def until_end(socket: ClientConnection) -> list[dict[str, Any]]:
    """The events of one turn, their numbers without a gap."""
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in ENDS:
        found.append(await next_event(socket))
    if "status" not in found[-1]:
        assert [each["sequence_number"] for each in found] == list(range(len(found)))
    return found


async def turn(socket: ClientConnection, **event: Any) -> dict[str, Any]:
    """What came of one turn: the response, or the error."""
    await send(socket, **event)
    last = (await until_end(socket))[-1]
    return dict(last["error"] if last["type"] == "error" else last["response"])


async def changed(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_a_turn_has_the_events_of_a_stream() -> None:
    async with serving(THINKS) as stack, opened(stack) as socket:
        await send(socket)
        framed = await until_end(socket)
        streamed = await events(stack)

    def plain(found: list[dict[str, Any]]) -> list[str]:
        id_ = found[0]["response"]["id"].removeprefix("resp_")
        return [
            json.dumps(
                {**each, "response": {"output": each["response"]["output"]}} if "response" in each else each
            ).replace(id_, "ID")
            for each in found
        ]

    assert plain(framed) == plain(streamed)


async def test_a_turn_continues_the_one_before_it_though_nothing_is_kept() -> None:
    async with serving(CALL) as stack, opened(stack) as socket:
        first = await turn(socket, tools=[ADD], store=False)
        result = {"type": "function_call_output", "call_id": first["output"][0]["call_id"], "output": "4"}
        second = await turn(
            socket, input=[result], tools=[ADD], previous_response_id=first["id"], store=False
        )
        third = await turn(socket, input="And now?", tools=[ADD], previous_response_id=second["id"])
        prompts = [roles(each.conversation.messages) for each in stack.tokenizer.prepared]
    assert (second["previous_response_id"], third["previous_response_id"]) == (first["id"], second["id"])
    assert prompts == [
        ["user"],
        ["user", "assistant", "tool"],
        ["user", "assistant", "tool", "assistant", "user"],
    ]


async def test_what_is_unknown_is_refused_by_the_code_that_clients_look_for() -> None:
    async with serving() as stack:
        async with opened(stack) as socket:
            first = await turn(socket, store=False)
            error = await turn(socket, previous_response_id="resp_of_another")
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
            # The connection, and what it remembers, are there yet.
            assert (await turn(socket, previous_response_id=first["id"]))["status"] == "completed"
        async with opened(stack) as socket:
            error = await turn(socket, previous_response_id=first["id"])
            assert error["code"] == "previous_response_not_found"
            assert (await turn(socket))["status"] == "completed"


async def test_a_continuation_that_fails_forgets_what_it_continued() -> None:
    async with serving() as stack, opened(stack) as socket:
        first = await turn(socket, store=False)
        result = {"type": "function_call_output", "call_id": "call_of_nobody", "output": "4"}
        error = await turn(socket, input=[result], previous_response_id=first["id"])
        assert (error["type"], error["param"]) == ("invalid_request_error", "input[0].call_id")
        error = await turn(socket, previous_response_id=first["id"])
        assert error["code"] == "previous_response_not_found"


async def test_a_compacted_conversation_begins_a_chain() -> None:
    async with serving() as stack, opened(stack) as socket:
        first = await turn(socket, store=False)
        given = [{"role": "user", "content": "hi"}, *first["output"], {"role": "user", "content": "on"}]
        compacted = await stack.http.post("/v1/responses/compact", json={"model": "tiny", "input": given})
        assert compacted.status_code == 200, compacted.text
        items = [*compacted.json()["output"], {"role": "user", "content": "What was it?"}]
        second = await turn(socket, input=items, store=False)
        third = await turn(socket, previous_response_id=second["id"], store=False)
    assert (second["previous_response_id"], third["previous_response_id"]) == (None, second["id"])


async def test_a_warm_up_generates_nothing_and_can_be_continued() -> None:
    async with serving() as stack, opened(stack) as socket:
        warm = await turn(socket, input=[], instructions="Be brief.", tools=[ADD], generate=False)
        answer = await turn(socket, instructions="Be brief.", tools=[ADD], previous_response_id=warm["id"])
        (engine,) = stack.engines
    assert (warm["status"], warm["output"]) == ("completed", [])
    assert warm["usage"]["output_tokens"] == 1
    assert (answer["previous_response_id"], len(answer["output"])) == (warm["id"], 1)
    # The engine has computed the prompt, and no more.
    assert engine.submissions[0].sampling.max_tokens == 1


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [ADD], "tool_choice": "required"},
        {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "object"}}}},
        {
            "max_thinking_tokens": 5,
            "reasoning": {"effort": "low"},
            "top_logprobs": 2,
            "max_output_tokens": 500,
        },
        {
            "truncation": "auto",
            "input": [{"role": "user", "content": "x" * 5000}, {"role": "user", "content": "hi"}],
        },
    ],
)
async def test_a_warm_up_takes_what_its_turn_will_take(options: dict[str, Any]) -> None:
    async with serving(THINKS) as stack, opened(stack) as socket:
        warm = await turn(socket, generate=False, **{"max_output_tokens": 20, **options})
        assert (warm["status"], warm["output"]) == ("completed", [])
        answer = await turn(socket, previous_response_id=warm["id"], truncation="auto")
        assert (answer["status"], answer["previous_response_id"]) == ("completed", warm["id"])


async def test_turns_are_answered_one_after_the_other() -> None:
    engine = ScriptedEngine(reply=says("It is 4."))
    engine.gate.clear()
    async with (
        serving(engine=engine, gateway={"socket": {"max_waiting": 2}}) as stack,
        opened(stack) as socket,
    ):
        await send(socket, metadata={"n": "0"})
        await changed(lambda: len(engine.submissions) == 1)
        for number in (1, 2, 3):
            await send(socket, metadata={"n": str(number)})
        refused = await next_event(socket)
        while refused["type"] != "error":
            refused = await next_event(socket)
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert len(engine.submissions) == 1
        engine.gate.set()
        ended = [await next_event(socket)]
        while len([each for each in ended if each["type"] == "response.completed"]) < 3:
            ended.append(await next_event(socket))
    told = [each["response"]["metadata"]["n"] for each in ended if "response" in each]
    assert told == sorted(told)
    assert set(told) == {"0", "1", "2"}


async def test_a_client_that_leaves_cancels_what_runs() -> None:
    engine = ScriptedEngine(reply=says(LONG), step_s=0.01)
    async with serving(engine=engine) as stack:
        async with opened(stack) as socket:
            await send(socket)
            while (await next_event(socket))["type"] != "response.output_text.delta":
                pass
        await changed(lambda: engine.num_running == 0)
        assert engine.cancels
        # Or without a word, while its next turn waits.
        socket = await opened(stack)
        await send(socket)
        await send(socket)
        await next_event(socket)
        socket.transport.abort()
        await changed(lambda: engine.num_running == 0 and len(engine.cancels) == 2)
        assert len(engine.submissions) == 2
        while stack.gateway.num_open:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("sent", "reason", "param"),
    [
        ("garbage", "MALFORMED_BODY", None),
        ("[]", "INVALID_ARGUMENT", None),
        (b"{}", "MALFORMED_BODY", None),
        ("{}", "INVALID_ARGUMENT", "model"),
        ({"type": "response.cancel"}, "INVALID_ARGUMENT", "type"),
        ({"stream": False}, "UNSUPPORTED_FIELD", "stream"),
        ({"background": True}, "UNSUPPORTED_FIELD", "background"),
        ({"stream_id": "a"}, "UNSUPPORTED_FIELD", "stream_id"),
        ({"model": "none"}, "MODEL_NOT_FOUND", "model"),
        ({"input": None}, "INVALID_ARGUMENT", "input"),
        ({"previous_response_id": ""}, "INVALID_ARGUMENT", "previous_response_id"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_said_and_the_connection_stays(
    sent: Any, reason: str, param: str | None
) -> None:
    async with serving() as stack, opened(stack) as socket:
        event = {"type": "response.create", "model": "tiny", "input": "hi"}
        await socket.send(json.dumps({**event, **sent}) if isinstance(sent, dict) else sent)
        (error,) = await until_end(socket)
        assert (error["error"]["reason"], error["error"]["param"]) == (reason, param)
        # OpenAI's SDKs read the parts beside the error.
        assert (error["code"], error["message"]) == (error["error"]["code"], error["error"]["message"])
        assert (await turn(socket, stream=True, background=False))["status"] == "completed"


async def test_warnings_that_http_has_in_headers_are_in_the_resource() -> None:
    async with serving() as stack, opened(stack) as socket:
        given = [{"role": "user", "content": "hi", "cache_control": 1}]
        response = await turn(socket, input=given, prompt_cache_retention="24h")
        plain = await turn(socket)
    assert "prompt_cache_retention has no effect" in response["warnings"][1]
    assert response["warnings"][0] == "ignored: input[0].cache_control"
    assert "warnings" not in plain


async def test_a_refusal_says_when_to_come_back() -> None:
    tenant = {"requests_per_minute": 1}
    keys = {"entries": [{"id": "k", "tenant": "acme", "hash": hash_key("mr-key")}]}
    async with serving(tenant=tenant, keys=keys) as stack:
        url = f"ws://127.0.0.1:{stack.gateway.http.port}/v1/responses"
        async with connect(url, additional_headers={"authorization": "Bearer mr-key"}) as socket:
            assert (await turn(socket))["status"] == "completed"
            await send(socket)
            (error,) = await until_end(socket)
    assert (error["status"], error["error"]["reason"]) == (429, "REQUEST_RATE_EXCEEDED")
    assert int(error["headers"]["retry-after"]) > 0
    assert not any(name.startswith("x-millrace") for name in error["headers"])


async def test_a_key_that_is_revoked_ends_what_its_connection_may() -> None:
    keys = {"entries": [{"id": "k", "tenant": "acme", "hash": hash_key("mr-key"), "expires_unix_s": 2**40}]}
    async with serving(keys=keys) as stack:
        url = f"ws://127.0.0.1:{stack.gateway.http.port}/v1/responses"
        async with connect(url, additional_headers={"authorization": "Bearer mr-key"}) as socket:
            assert (await turn(socket))["status"] == "completed"
            directory = stack.gateway._edge.directory
            directory._clock = lambda: 2.0**41
            await send(socket)
            (error,) = await until_end(socket)
    assert (error["status"], error["error"]["reason"]) == (401, "INVALID_CREDENTIALS")


async def test_without_a_key_nothing_is_opened() -> None:
    async with serving() as stack:
        url = f"ws://127.0.0.1:{stack.gateway.http.port}/v1/responses"
        with pytest.raises(InvalidStatus) as caught:
            await connect(url)
        response = caught.value.response
        assert response.status_code == 401
        assert json.loads(response.body or b"")["error"]["reason"] == "MISSING_CREDENTIALS"


async def test_a_tenant_has_so_many_sockets() -> None:
    async with serving(gateway={"socket": {"max_of_tenant": 1}}, tenants={"other": {}}) as stack:
        async with opened(stack) as socket:
            with pytest.raises(InvalidStatus) as caught:
                await opened(stack)
            assert caught.value.response.status_code == 429
            async with opened(stack, tenant="other") as another:
                assert (await turn(another))["status"] == "completed"
            assert (await turn(socket))["status"] == "completed"
        async with opened(stack) as socket:
            assert (await turn(socket))["status"] == "completed"


async def test_a_message_that_is_too_large_is_refused_before_it_is_whole() -> None:
    async with serving(gateway={"max_body_bytes": 100_000}) as stack:
        async with opened(stack) as socket:
            await socket.send(["x" * 60_000, "x" * 60_000, "x" * 60_000])
            (error,) = await until_end(socket)
            assert (error["status"], error["error"]["reason"]) == (413, "REQUEST_TOO_LARGE")
            with pytest.raises(ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1009
        async with opened(stack) as socket:
            assert (await turn(socket, input="x" * 4))["status"] == "completed"


async def test_large_messages_share_the_room_of_large_bodies() -> None:
    engine = ScriptedEngine(reply=says("It is 4."), max_model_len=10**6)
    engine.gate.clear()
    limits = {"request": {"max_held_bytes": 1_000_000}}
    async with serving(engine=engine, gateway=limits) as stack, opened(stack) as socket:
        await send(socket, input="x" * 100_000)
        await changed(lambda: len(engine.submissions) == 1)
        await socket.send(json.dumps({"type": "response.create", "input": "x" * 150_000}))
        while (event := await next_event(socket))["type"] != "error":
            pass
        assert event["error"]["reason"] == "QUEUE_LIMIT_EXCEEDED"
        await socket.wait_closed()
        assert socket.close_code == 1013
        engine.gate.set()
        while stack.gateway._intake._held.of:
            await asyncio.sleep(0.01)


async def test_an_answer_whose_client_does_not_read_is_ended_with_the_reason() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x" * 60_000), max_model_len=100_000)
    limits = {"request": {"max_unread": 1000}}
    async with (
        serving(engine=engine, gateway=limits) as stack,
        opened(stack, max_queue=1, max_size=None) as socket,
    ):
        await send(socket, top_logprobs=5, max_output_tokens=50_000)
        await changed(lambda: bool(engine.cancels))
        last: dict[str, Any] = {"type": ""}
        while last["type"] != "error":
            last = json.loads(await socket.recv())
        assert "does not read its stream" in last["message"]
        assert json.loads(await socket.recv())["type"] == "response.failed"
        # The connection is there yet.
        engine.reply = says("It is 4.")
        assert (await turn(socket))["status"] == "completed"


async def test_a_connection_has_a_longest_time() -> None:
    engine = ScriptedEngine(reply=says("It is 4."))
    engine.gate.clear()
    async with serving(engine=engine) as stack, opened(stack) as idle, opened(stack) as busy:
        await send(busy)
        await changed(lambda: len(engine.submissions) == 1)
        sockets = stack.gateway.http._application.sockets
        assert sockets is not None
        for session in sockets._open:
            session._ends_s = 0.0
            session._more.set()
        (error,) = await until_end(idle)
        assert error["status"] == 400
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        with pytest.raises(ConnectionClosed):
            await idle.recv()
        # What runs is not cut off.
        engine.gate.set()
        assert (await until_end(busy))[-1]["type"] == "response.completed"
        assert (await until_end(busy))[0]["error"]["code"] == "websocket_connection_limit_reached"


def read(stack: Deployment, metric: Metric, **labels: str) -> float | None:
    return stack.metrics.registry.get_sample_value(metric.name, labels)


async def test_open_sockets_and_their_ends_are_counted() -> None:
    async with serving(gateway={"socket": {"max_of_tenant": 1}}) as stack:

        def ends(reason: str) -> float | None:
            return read(stack, names.SOCKET_ENDS, reason=reason)

        async with opened(stack) as socket:
            assert read(stack, names.OPEN_SOCKETS) == 1
            with pytest.raises(InvalidStatus):
                await opened(stack)
            await changed(lambda: ends("refused") == 1)
            await turn(socket)
        await changed(lambda: ends("client") == 1)
        assert read(stack, names.OPEN_SOCKETS) == 0
        async with opened(stack) as socket:
            sockets = stack.gateway.http._application.sockets
            assert sockets is not None
            for session in sockets._open:
                session._ends_s = 0.0
                session._more.set()
            await until_end(socket)
            await changed(lambda: ends("lifetime") == 1)
        async with opened(stack):
            await stack.gateway.drain()
            await changed(lambda: ends("restart") == 1)
        assert (ends("failed"), read(stack, names.OPEN_SOCKETS)) == (0, 0)


async def test_a_gateway_that_drains_lets_go_of_its_sockets() -> None:
    engine = ScriptedEngine(reply=says("It is 4."))
    engine.gate.clear()
    async with serving(engine=engine) as stack, opened(stack) as idle, opened(stack) as busy:
        await send(busy)
        await changed(lambda: len(engine.submissions) == 1)
        draining = asyncio.create_task(stack.gateway.drain())
        with pytest.raises(ConnectionClosed):
            await idle.recv()
        assert idle.close_code == 1012
        engine.gate.set()
        assert (await until_end(busy))[-1]["type"] == "response.completed"
        with pytest.raises(ConnectionClosed):
            await busy.recv()
        assert busy.close_code == 1012
        await draining


async def test_each_turn_is_in_the_books(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    async with serving(gateway={"ledger": {"url": url, "flush_interval_s": 0.01}}) as stack:
        async with opened(stack, "connection") as socket:
            responses = [await turn(socket) for _ in range(2)]
        query = select(REQUESTS.c.request_id).order_by(REQUESTS.c.request_id)
        with open_ledger(url).connect() as connection:
            while connection.scalar(select(func.count()).select_from(REQUESTS)) != 2:
                await asyncio.sleep(0.01)
            ids = list(connection.scalars(query))
    assert ids == ["connection-1", "connection-2"]
    assert [each["id"] for each in responses] == [f"resp_{each}" for each in ids]


async def test_what_is_kept_of_a_connection_is_whole(tmp_path: Path) -> None:
    store = {"tenants": ["*"], "url": f"sqlite:///{tmp_path / 'store.sqlite'}", "key": KEY}
    async with serving(gateway={"store": store}) as stack:
        async with opened(stack) as socket:
            unkept = await turn(socket, store=False, input="one")
            kept = await turn(socket, input="two", previous_response_id=unkept["id"])
            assert (kept["store"], kept["previous_response_id"]) == (True, unkept["id"])
        # Another connection knows what is kept, with all that came before it, but not where it keeps nothing.
        async with opened(stack, "another") as socket:
            error = await turn(socket, previous_response_id=kept["id"], store=False)
            assert error["code"] == "previous_response_not_found"
            last = await turn(socket, input="three", previous_response_id=kept["id"])
        prompt = stack.tokenizer.prepared[-1].conversation.messages
        got = (await stack.http.get(f"/v1/responses/{last['id']}")).json()
    assert [each.content for each in prompt if each.content != "It is 4."] == ["one", "two", "three"]
    assert without_moments(got) == without_moments(last)


async def test_openais_own_client_is_served() -> None:
    async with serving() as stack:
        client = openai.AsyncOpenAI(
            base_url=f"{stack.http.base_url}/v1",
            api_key="checked at the edge",
            default_headers={CONTEXT_HEADER: signed_context()},
        )
        async with client.responses.connect() as connection:
            await connection.response.create(model="tiny", input="hi", store=False)
            text = ""
            async for event in connection:
                if event.type == "response.output_text.delta":
                    text += event.delta
                if event.type == "response.completed":
                    break
    assert text == "It is 4."


@pytest.mark.parametrize("event", [{"type": "session.update"}, {"type": "session.update", "session": {}}])
async def test_an_event_of_another_type_is_refused_by_its_type(event: dict[str, Any]) -> None:
    async with serving() as stack, opened(stack) as socket:
        await socket.send(json.dumps(event))
        error = (await next_event(socket))["error"]
        assert error["param"] == "type"
        assert "send response.create" in error["message"]
        assert (await turn(socket))["status"] == "completed"
