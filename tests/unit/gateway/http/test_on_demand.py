"""Requests for models that are loaded on demand wait for the load, are told how far it is, or are refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from runtime.loads import Demands, LoadState, LoadStates, line
from tests.unit.gateway.rig.deployment import Deployment, deployed

CHAT = "/v1/chat/completions"
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
LOADING = LoadState(state="loading", stage="read weights", fraction=0.5, left_s=7.0)
LOADED = LoadState(state="loaded")


class Loader:
    """A supervisor that says what the test says, and hears what the gateway does."""

    def __init__(self) -> None:
        self.demands = Demands(seen=0)
        self._states = LoadStates(number=0, models={})
        self._writers: list[asyncio.StreamWriter] = []

    def say(self, state: LoadState) -> None:
        self._states = LoadStates(number=self._states.number + 1, models={"tiny": state})
        for writer in self._writers:
            writer.write(line(self._states))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        writer.write(line(self._states))
        while text := await reader.readline():
            self.demands = msgspec.json.decode(text, type=Demands)

    async def until(self, condition: Callable[[Demands], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition(self.demands):
                await asyncio.sleep(0.01)

    def waiting(self) -> int:
        return self.demands.models["tiny"].num_waiting if "tiny" in self.demands.models else 0


@asynccontextmanager
async def on_demand(path: Path, **model: object) -> AsyncIterator[tuple[Deployment, Loader]]:
    loader = Loader()
    server = await asyncio.start_unix_server(loader.serve, path / "loads")
    tables = {"gateway": {"loader": str(path / "loads")}, "model": {"load": "on demand", **model}}
    async with deployed(tables=tables) as stack:
        yield stack, loader
    server.close()


async def test_a_request_waits_for_the_load(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LoadState())
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await loader.until(lambda _: loader.waiting() == 1)
        loader.say(LOADING)
        await loader.until(lambda demands: demands.seen == 2)
        assert not asking.done()
        loader.say(LOADED)
        answer = await asking
        assert answer.status_code == 200
        await loader.until(lambda demands: not demands.models)


async def test_what_is_unloading_gets_nothing_new(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LOADED)
        assert (await stack.http.post(CHAT, json=BODY)).status_code == 200
        loader.say(LoadState(state="unloading"))
        await loader.until(lambda demands: demands.seen == 2)
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await loader.until(lambda _: loader.waiting() == 1)
        assert not asking.done()
        loader.say(LOADED)
        assert (await asking).status_code == 200


async def test_what_is_left_of_a_load_is_said_once_though_it_takes_longer(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(msgspec.structs.replace(LOADING, left_s=1.0))
        async with stack.http.stream("POST", CHAT, json={**BODY, "stream": True}) as answer:
            told: list[str] = []
            async for each in answer.aiter_lines():
                told += [each] * each.startswith(": ")
                if len(told) == 2:
                    loader.say(LOADED)
    text = ": tiny is being loaded read weights 50%"
    assert told[:2] == [f"{text}, about 1 s left", text]


@pytest.mark.parametrize(
    ("path", "body", "end"),
    [
        (CHAT, BODY, b"data: [DONE]"),
        ("/v1/completions", {"model": "tiny", "prompt": "hi", "max_tokens": 4}, b"data: [DONE]"),
        ("/v1/messages", {**BODY}, b"message_stop"),
        ("/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 4}, b"response."),
    ],
)
async def test_a_stream_says_how_far_it_is(
    tmp_path: Path, path: str, body: dict[str, object], end: bytes
) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LOADING)
        headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
        async with stack.http.stream("POST", path, json={**body, "stream": True}, headers=headers) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            assert await anext(lines) == ": tiny is being loaded read weights 50%, about 7 s left"
            loader.say(LOADED)
            rest = "\n".join([each async for each in lines]).encode()
        assert end in rest
        assert b"error" not in rest.lower().replace(b'"error":null', b"")


@pytest.mark.parametrize(
    ("path", "form"), [(CHAT, b'data: {"error"'), ("/v1/messages", b'event: error\ndata: {"type":"error"')]
)
async def test_a_stream_that_has_waited_ends_with_the_failure(tmp_path: Path, path: str, form: bytes) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LOADING)
        headers = {"anthropic-version": "2023-06-01"} if path == "/v1/messages" else {}
        async with stack.http.stream("POST", path, json={**BODY, "stream": True}, headers=headers) as answer:
            lines = answer.aiter_lines()
            assert (await anext(lines)).startswith(": tiny")
            loader.say(LoadState(num_failures=1, why="engine-3: model.path: the weights are gone"))
            rest = "\n".join([each async for each in lines]).encode()
        assert form in rest
        assert b"the weights are gone" in rest


async def test_a_load_that_fails_is_refused_by_name_and_tried_again(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LoadState(num_failures=3, why="long ago"))
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await loader.until(lambda _: loader.waiting() == 1)
        loader.say(LoadState(num_failures=4, why="engine-3: too large"))
        answer = await asking
        assert answer.status_code == 503
        error = answer.json()["error"]
        assert error["param"] == "model"
        assert "'tiny' cannot be loaded: engine-3: too large" in error["message"]
        assert int(answer.headers["retry-after"]) >= 1


async def test_further_requests_than_the_queue_takes_are_refused_with_a_delay(tmp_path: Path) -> None:
    async with on_demand(tmp_path, load_queue=2) as (stack, loader):
        loader.say(LOADING)
        asking = [asyncio.create_task(stack.http.post(CHAT, json=BODY)) for _ in range(2)]
        await loader.until(lambda _: loader.waiting() == 2)
        refused = await stack.http.post(CHAT, json=BODY)
        assert refused.status_code in (429, 503)
        assert refused.headers["retry-after"] == "7"
        assert "load_queue" in refused.json()["error"]["message"]
        loader.say(LOADED)
        assert [(await each).status_code for each in asking] == [200, 200]


async def test_a_client_that_leaves_waits_no_more(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        loader.say(LOADING)
        asking = asyncio.create_task(stack.http.post(CHAT, json=BODY))
        await loader.until(lambda _: loader.waiting() == 1)
        asking.cancel()
        await loader.until(lambda _: loader.waiting() == 0)


async def test_a_model_is_listed_with_its_state(tmp_path: Path) -> None:
    async with on_demand(tmp_path) as (stack, loader):
        for number, state in enumerate(("unloaded", "loading", "loaded", "unloading"), start=1):
            loader.say(LoadState(state=state))  # type: ignore[arg-type]
            await loader.until(lambda demands, number=number: demands.seen == number)  # type: ignore[misc]
            (card,) = [
                each for each in (await stack.http.get("/v1/models")).json()["data"] if each["id"] == "tiny"
            ]
            assert card["state"] == state


async def test_without_a_supervisor_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.models.loads._ALONE_S", 0.1)
    tables = {"gateway": {"loader": str(tmp_path / "none")}, "model": {"load": "on demand"}}
    async with deployed(tables=tables) as stack:
        answer = await stack.http.post(CHAT, json=BODY)
        assert answer.status_code == 503
        assert "the supervisor does not answer" in answer.json()["error"]["message"]
