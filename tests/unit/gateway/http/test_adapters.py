"""Operators add and remove adapters over HTTP, on all engines of a model or on none; nobody else does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from tests.unit.gateway.rig.deployment import Deployment, deployed, serve_engine
from tests.unit.gateway.rig.engine import ScriptedEngine

ADMIN = {"gateway": {"admin_tenants": ["acme"]}}


async def load(stack: Deployment, name: str, path: str) -> httpx.Response:
    return await stack.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})


async def unload(stack: Deployment, name: str) -> httpx.Response:
    return await stack.http.post("/v1/unload_lora_adapter", json={"lora_name": name, "lora_int_id": None})


async def listed(stack: Deployment) -> list[tuple[str, str, str]]:
    page = (await stack.http.get("/v1/lora_adapters")).json()
    return [(each["id"], each["parent"], each["root"]) for each in page["data"]]


def told(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_an_adapter_is_added_asked_for_and_removed() -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b")]
    async with deployed(*engines, tables=ADMIN) as stack:
        added = await load(stack, "poet", "/adapters/poet")
        assert (added.status_code, added.json()) == (200, {"message": "adapter tiny:poet is served"})
        assert [each.paths for each in engines] == [{"poet": "/adapters/poet"}] * 2
        assert await listed(stack) == [("tiny:poet", "tiny", "/adapters/poet")]
        answered = await stack.chat(model="tiny:poet")
        assert (answered.status_code, answered.json()["model"]) == (200, "tiny:poet")
        # By the name of the model, too.
        assert (await unload(stack, "tiny:poet")).status_code == 200
        assert (await listed(stack), [each.paths for each in engines]) == ([], [{}, {}])
        gone = await unload(stack, "poet")
        assert (gone.status_code, told(gone)["reason"]) == (404, "MODEL_NOT_FOUND")


@pytest.mark.parametrize("former", ["", "/adapters/first"])
async def test_what_one_engine_refuses_is_added_to_none(former: str) -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b", unreadable=("/adapters/new",))]
    async with deployed(*engines, tables=ADMIN) as stack:
        if former:
            assert (await load(stack, "poet", former)).status_code == 200
        refused = await load(stack, "poet", "/adapters/new")
        assert (refused.status_code, told(refused)["message"]) == (
            400,
            "lora_path: b finds nothing at /adapters/new",
        )
        assert [each.paths for each in engines] == [{"poet": former} if former else {}] * 2


async def versions(stack: Deployment, engine: ScriptedEngine, *, num: int = 3) -> set[str]:
    """Versions that requests for the poet, which are all answered, ask an engine for."""
    engine.submissions.clear()
    for _ in range(num):
        answered = await stack.chat(model="tiny:poet")
        assert answered.status_code == 200, answered.text
    return {submit.adapter_version for submit in engine.submissions}


async def until(stack: Deployment, condition: Callable[[], bool]) -> None:
    """Waits until something is so, at the gateway or at an engine."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def restarted(stack: Deployment, index: int) -> None:
    """An engine that was lost comes back with its configuration alone."""
    server, engine = stack.engine_servers[index], stack.engines[index]
    attachment = list(stack.gateway.fleet.attachments)[index]
    losses = attachment.num_losses
    await server.stop(0)
    engine.restart()
    await until(stack, lambda: attachment.num_losses > losses)
    stack.engine_servers[index] = await serve_engine(engine, f"127.0.0.1:{server.port}")
    await until(stack, lambda: attachment.info is not None)


@pytest.mark.parametrize("former", ["", "/adapters/first"])
async def test_a_name_is_changed_when_that_is_answered_and_until_then_nobody_is_put_off(former: str) -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b")]
    async with deployed(*engines, tables=ADMIN) as stack:
        if former:
            assert (await load(stack, "poet", former)).status_code == 200
        seen: list[tuple[str, int]] = []

        async def watched(change: Awaitable[httpx.Response], what: str) -> httpx.Response:
            # One engine tells late what it has done.
            engines[1].tells.clear()
            before = [each.paths for each in engines]
            changing = asyncio.ensure_future(change)
            await until(stack, lambda: all(x.paths != y for x, y in zip(engines, before, strict=True)))
            seen.extend([(what, (await stack.chat(model="tiny:poet")).status_code) for _ in range(20)])
            assert not changing.done()
            engines[1].tells.set()
            return await changing

        assert (await watched(load(stack, "poet", "/adapters/new"), "load")).status_code == 200
        asked = set().union(*[await versions(stack, each) for each in engines])
        assert asked == {"wen/sretpada/"}
        assert (await watched(unload(stack, "poet"), "unload")).status_code == 200
        gone = await stack.chat(model="tiny:poet")
        assert (gone.status_code, told(gone)["reason"]) == (404, "MODEL_NOT_FOUND")
        assert {status for _, status in seen} <= {200, 404}
        if former:
            assert {status for what, status in seen if what == "load"} == {200}


async def test_an_engine_that_comes_back_is_given_what_was_loaded_last() -> None:
    engines = [ScriptedEngine(name=name, adapters=("poet", "bard")) for name in "ab"]
    async with deployed(*engines, tables=ADMIN) as stack:
        assert await versions(stack, engines[1]) <= {"teop/derugifnoc/"}
        assert (await unload(stack, "poet")).status_code == 200
        assert (await unload(stack, "bard")).status_code == 200
        assert (await load(stack, "poet", "/adapters/new")).status_code == 200
        # Until it has that, it is asked for nothing else.
        engines[1].answers.clear()
        await restarted(stack, 1)
        assert engines[1].paths["poet"] == "/configured/poet"
        assert await versions(stack, engines[1]) == set()
        assert await listed(stack) == [("tiny:poet", "tiny", "/adapters/new")]
        engines[1].answers.set()
        await until(stack, lambda: engines[1].paths == {"poet": "/adapters/new"})
        await stack.engine_servers[0].stop(0)
        await until(stack, lambda: len(stack.gateway.fleet.ready) == 1)
        assert await versions(stack, engines[1]) == {"wen/sretpada/"}
        assert (await stack.chat(model="tiny:bard")).status_code == 404


async def test_a_gateway_that_starts_learns_from_the_engines_and_all_follow_the_newest_change() -> None:
    engines = [ScriptedEngine(name=name, adapters=("poet",)) for name in "ab"]
    async with deployed(*engines, tables=ADMIN) as first:
        assert (await load(first, "poet", "/adapters/new")).status_code == 200
        # It has not heard of that, as if it had been started while no gateway ran.
        engines[1].restart()
        async with deployed(*engines, tables=ADMIN) as second:
            assert await listed(second) == [("tiny:poet", "tiny", "/adapters/new")]
            await until(second, lambda: engines[1].paths == {"poet": "/adapters/new"})
            assert (await load(second, "poet", "/adapters/newer")).status_code == 200
            await until(first, lambda: first.gateway.fleet.adapters.of("")["poet"].path == "/adapters/newer")
            assert (await unload(first, "poet")).status_code == 200
            await until(second, lambda: not second.gateway.fleet.adapters.of("")["poet"].version)
            assert (await second.chat(model="tiny:poet")).status_code == 404


async def test_no_answer_goes_on_with_other_weights() -> None:
    engines = [ScriptedEngine(name=name, adapters=("poet",)) for name in "ab"]
    async with deployed(*engines, tables=ADMIN) as stack:
        for engine in engines:
            engine.gate.clear()
            engine.tokens_per_step = 2
        running = asyncio.ensure_future(stack.chat(model="tiny:poet"))
        await until(stack, lambda: any(each.submissions for each in engines))
        dying, other = engines if engines[0].submissions else engines[::-1]
        # It has answered a part of it when it dies, and the other one has the new weights by then.
        dying.dies_after_tokens = 3
        assert (await load(stack, "poet", "/adapters/new")).status_code == 200
        for engine in engines:
            engine.gate.set()
        answered = await running
        assert (answered.status_code, told(answered)["reason"]) == (404, "MODEL_NOT_FOUND")
        assert "weights were replaced" in told(answered)["message"]
        assert not other.submissions
        assert await versions(stack, other) <= {"wen/sretpada/"}


async def test_what_no_engine_can_read_any_more_is_told_as_what_no_retry_mends() -> None:
    engine = ScriptedEngine(name="a")
    async with deployed(engine, tables=ADMIN) as stack:
        assert (await load(stack, "poet", "/adapters/new")).status_code == 200
        engine.unreadable = ("/adapters/new",)
        await restarted(stack, 0)
        async with asyncio.timeout(30):
            while (answered := await stack.chat(model="tiny:poet")).status_code == 503:
                await asyncio.sleep(0.01)
        assert (answered.status_code, told(answered)["param"]) == (404, "model")
        assert "a finds nothing at /adapters/new" in told(answered)["message"]
        assert "have it loaded again" in told(answered)["message"]
        # As it was asked to be.
        engine.unreadable = ()
        assert (await load(stack, "poet", "/adapters/new")).status_code == 200
        assert await versions(stack, engine) == {"wen/sretpada/"}


async def test_other_tenants_change_nothing() -> None:
    engine = ScriptedEngine()
    async with deployed(engine) as stack:
        calls = [
            await load(stack, "poet", "/adapters/poet"),
            await unload(stack, "poet"),
            await stack.http.get("/v1/lora_adapters"),
        ]
        for refused in calls:
            assert (refused.status_code, told(refused)["reason"]) == (403, "TENANT_NOT_ALLOWED")
            assert "gateway.admin_tenants" in told(refused)["message"]
        assert not engine.paths


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_name": "other:poet", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "tiny:", "lora_path": "/p"}, "lora_name"),
        ({"lora_name": "poet"}, "lora_path"),
        ({"lora_name": "poet", "lora_path": 1}, "lora_path"),
        ({"lora_name": "poet", "lora_path": "/p", "rank": 8}, "rank"),
    ],
)
async def test_a_bad_body_names_its_field(body: dict[str, Any], field: str) -> None:
    async with deployed(tables=ADMIN) as stack:
        refused = await stack.http.post("/v1/load_lora_adapter", json=body)
        assert refused.status_code == 400
        assert field in told(refused)["message"] or field == told(refused)["param"]
