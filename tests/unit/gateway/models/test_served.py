"""Several models behind one gateway: who is asked, what is told, and what changes while requests run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gateway.models.catalog import Catalog
from runtime import models
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, serve_engine, signed_context
from tests.unit.gateway.rig.engine import Reply, ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode


def says(text: str) -> Reply:
    return lambda submit, choice: [*encode(text), END_ID]


def engine(name: str, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(name=f"engine of {name}", model=name, reply=says(f"I am {name}"), **more)


TWO: dict[str, Any] = {"models": {"big": {"path": "b"}, "small": {"path": "s"}}}


def catalog(stack: Deployment) -> Catalog:
    return stack.gateway._catalog


async def answer(stack: Deployment, **body: Any) -> tuple[str, str]:
    """Model and text of an answer."""
    response = await stack.chat(**body)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["model"], told["choices"][0]["message"]["content"]


async def test_every_model_is_answered_by_its_engines() -> None:
    served = {"models": {"a": {"path": "x", "aliases": ["first"]}, "b@2": {"path": "y"}}}
    async with deployed(engine("a"), engine("b@2", revision="2"), tables={"served": served}) as stack:
        listed = (await stack.http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == ["a", "first", "b@2"]
        assert await answer(stack, model="a") == ("a", "I am a")
        assert await answer(stack, model="first") == ("first", "I am a")
        assert await answer(stack, model="b@2") == ("b@2", "I am b@2")
        assert {request.model for request in stack.tokenizer.prepared} == {"a", "b@2"}
        refused = await stack.chat(model="c")
        assert refused.status_code == 404
        assert "available: a, first, b@2" in refused.json()["error"]["message"]
        page = (await stack.http.get("/metrics")).text
        assert 'model="b@2",outcome="ok",revision="2"' in page


@pytest.mark.usefixtures("impatient")
async def test_an_engine_of_another_revision_is_not_used() -> None:
    served = {"models": {"a": {"path": "x", "revision": "2"}, "b": {"path": "y"}}}
    async with deployed(engine("a", revision="1"), engine("b"), tables={"served": served}) as stack:
        refused = await stack.chat(model="a")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "ENGINE_UNAVAILABLE")
        # Engines of other models have nothing to do with it.
        assert "for model 'a@2' now" in refused.json()["error"]["message"]
        assert "ready" not in refused.json()["error"]["message"]
        assert await answer(stack, model="b") == ("b", "I am b")


async def test_an_alias_of_weights_is_sticky_and_tells_who_answered() -> None:
    served = {**TWO, "routes": {"chat": {"big": 50, "small": 50}}}
    async with deployed(engine("big"), engine("small"), tables={"served": served}) as stack:
        found = {}
        for number in range(12):
            told, text = await answer(stack, model="chat", prompt_cache_key=str(number))
            assert text == f"I am {told}"
            found[number] = told
        assert set(found.values()) == {"big", "small"}
        for number, told in found.items():
            assert (await answer(stack, model="chat", prompt_cache_key=str(number)))[0] == told


@pytest.mark.usefixtures("impatient")
async def test_a_model_without_engines_is_left_out_of_an_alias() -> None:
    served = {**TWO, "routes": {"chat": {"big": 50, "small": 50}}}
    async with deployed(engine("small"), tables={"served": served}) as stack:
        told = {(await answer(stack, model="chat", prompt_cache_key=str(each)))[0] for each in range(8)}
        assert told == {"small"}


@pytest.mark.parametrize(
    ("allowed", "listed"),
    [((), ["big", "small", "chat"]), (("chat",), ["chat"]), (("big",), ["big"]), (("none",), [])],
)
async def test_a_key_sees_what_it_may_use(allowed: tuple[str, ...], listed: list[str]) -> None:
    served = {**TWO, "routes": {"chat": {"big": 1, "small": 1}}}
    async with deployed(engine("big"), engine("small"), tables={"served": served}) as stack:
        headers = {CONTEXT_HEADER: signed_context(allowed_models=allowed)}
        page = (await stack.http.get("/v1/models", headers=headers)).json()
        assert [each["id"] for each in page["data"]] == listed
        body = {"messages": [{"role": "user", "content": "hi"}]}
        for name in ("big", "small", "chat"):
            response = await stack.http.post(
                "/v1/chat/completions", json={"model": name, **body}, headers=headers
            )
            assert response.status_code == (200 if name in listed else 403)


async def test_models_may_be_kept_to_tenants_and_tiers() -> None:
    served = {
        "models": {
            "ours": {"path": "x"},
            "theirs": {"path": "y", "tenants": ["other"]},
            "fast": {"path": "z", "tiers": ["fast"]},
        }
    }
    engines = [engine(name) for name in served["models"]]
    async with deployed(*engines, tables={"served": served, "tenants": {"other": {}}}) as stack:
        listed = [each["id"] for each in (await stack.http.get("/v1/models")).json()["data"]]
        assert listed == ["ours", "fast"]
        refused = await stack.chat(model="theirs")
        assert refused.status_code == 403
        assert "tenant acme may not use model 'theirs'" in refused.json()["error"]["message"]
        slow = await stack.chat(model="fast")
        assert (slow.status_code, slow.json()["error"]["param"]) == (403, "service_tier")
        assert (await answer(stack, model="fast", service_tier="fast"))[0] == "fast"


async def test_defaults_and_limits_are_the_models_own() -> None:
    served = {
        "models": {
            "big": {"path": "b", "defaults": {"temperature": 0.25}},
            "small": {"path": "s", "max_context_tokens": 40},
        }
    }
    engines = [engine("big"), engine("small")]
    async with deployed(*engines, tables={"served": served}) as stack:
        await answer(stack, model="big")
        assert engines[0].submissions[0].sampling.temperature == 0.25
        await answer(stack, model="small")
        prompt = len(engines[1].submissions[0].prompt_token_ids)
        assert engines[1].submissions[0].sampling.max_tokens == 40 - prompt
        refused = await stack.chat(model="small", max_tokens=40)
        assert refused.json()["error"]["reason"] == "CONTEXT_LENGTH_EXCEEDED"


async def test_models_come_and_go_while_a_stream_of_another_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "models.json"
    file.write_text('{"models": {"big": {"path": "b"}, "small": {"path": "s"}}}')
    models.use(models.Source(None, {"MILLRACE_MODELS_FILE": str(file)}))
    big, small, third = engine("big"), engine("small"), engine("third")
    try:
        async with deployed(big, small, tables={"served": TWO}) as stack:
            small.gate.clear()
            running = asyncio.create_task(answer(stack, model="small"))
            while not small.submissions:
                await asyncio.sleep(0.01)
            server = await serve_engine(third)
            stack.engine_servers.append(server)
            targets = [f"127.0.0.1:{each.port}" for each in stack.engine_servers]
            await stack.gateway.fleet.set_targets(targets)
            file.write_text('{"models": {"big": {"path": "b"}, "third": {"path": "t"}}}')
            while "third" not in catalog(stack).askable or "small" in catalog(stack).served:
                await asyncio.sleep(0.05)
            assert await answer(stack, model="third") == ("third", "I am third")
            assert (await stack.chat(model="small")).status_code == 404
            small.gate.set()
            assert await running == ("small", "I am small")
            await server.stop(0)
    finally:
        models.use(models.Source(None, {}))


async def test_another_revision_takes_over_when_an_engine_serves_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "models.json"
    old, new = engine("a", revision="1"), engine("a", revision="2")
    new.reply = says("I am new")
    served = {"models": {"a": {"path": "x", "revision": "1"}}}
    file.write_text("{}")
    models.use(models.Source(None, {"MILLRACE_MODELS_FILE": str(file)}))
    try:
        async with deployed(old, tables={"served": served}) as stack:
            # The same revision of another checkpoint is not believed.
            file.write_text('{"models": {"a": {"path": "y", "revision": "1"}}}')
            while "what is served stays as it was" not in caplog.text:
                await asyncio.sleep(0.05)
            file.write_text('{"models": {"a": {"path": "y", "revision": "2"}}}')
            while not catalog(stack)._pending:
                await asyncio.sleep(0.05)
            assert await answer(stack, model="a") == ("a", "I am a")
            server = await serve_engine(new)
            targets = [f"127.0.0.1:{each.port}" for each in (*stack.engine_servers, server)]
            await stack.gateway.fleet.set_targets(targets)
            while catalog(stack)._pending:
                await asyncio.sleep(0.05)
            assert await answer(stack, model="a") == ("a", "I am new")
            assert await answer(stack, model="a@2") == ("a@2", "I am new")
            await server.stop(0)
    finally:
        models.use(models.Source(None, {}))
