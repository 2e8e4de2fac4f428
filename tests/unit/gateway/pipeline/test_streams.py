"""Branches and prompts are streams: a request takes the slots of all at once, and gives them all back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import httpx
import pytest
from millrace.inference.v1 import inference_pb2

from contract.errors import Reason
from contract.proto.status import from_rpc_error
from gateway.limits.store import MemoryLimitStore
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

METADATA = ((CONTEXT_HEADER, signed_context()),)


def limited(limit: int) -> dict[str, Any]:
    return {"tenant": {"max_concurrent_streams": limit}}


def held(rig: Deployment) -> int:
    store = rig.gateway._edge.limiter._store
    assert isinstance(store, MemoryLimitStore)
    return sum(lease.slots for leases in store._leases.values() for lease in leases.values())


async def ask(rig: Deployment, prompt: str | list[str] = "a", **body: Any) -> httpx.Response:
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 1.0, **body}
    if "beam_width" in options:
        del options["temperature"]
    return await rig.http.post("/v1/completions", json=options)


async def until_all_is_given_back(rig: Deployment) -> None:
    async with asyncio.timeout(10):
        while rig.gateway.num_open or held(rig):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("prompt", "more", "num_streams"),
    [
        ("a", {"n": 3}, 3),
        ("a", {"best_of": 4}, 4),
        ("a", {"n": 2, "beam_width": 4}, 4),
        (["a", "b"], {"n": 2}, 4),
        (["a", "b", "c"], {}, 3),
    ],
)
async def test_slots_of_a_request_are_those_of_its_sequences(
    prompt: str | list[str], more: dict[str, int], num_streams: int
) -> None:
    engine = ScriptedEngine()
    async with deployed(engine, tables=limited(4)) as rig:
        engine.gate.clear()
        asking = asyncio.create_task(ask(rig, prompt, **more))
        async with asyncio.timeout(10):
            while engine.num_running < (len(prompt) if isinstance(prompt, list) else 1):
                await asyncio.sleep(0.001)
        assert held(rig) == num_streams
        refused = await ask(rig, n=4 - num_streams + 1)
        assert refused.status_code == 429
        assert refused.json()["error"]["reason"] == Reason.CONCURRENCY_EXCEEDED
        assert held(rig) == num_streams
        engine.gate.set()
        assert (await asking).status_code == 200
        await until_all_is_given_back(rig)
        assert (await ask(rig, n=4)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "more", "field"),
    [
        ("a", {"n": 5}, "n"),
        ("a", {"n": 2, "best_of": 5}, "best_of"),
        ("a", {"beam_width": 5}, "beam_width"),
        (["a", "b", "c", "d", "e"], {}, "prompt"),
        (["a", "b"], {"n": 3}, "prompt"),
    ],
)
async def test_what_never_fits_is_refused_for_good_by_its_field(
    prompt: str | list[str], more: dict[str, int], field: str
) -> None:
    engine = ScriptedEngine()
    async with deployed(engine, tables=limited(4)) as rig:
        refused = await ask(rig, prompt, **more)
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, field)
        assert "the limit is 4 (max_concurrent_streams of tenant acme)" in error["message"]
        assert "retry-after" not in refused.headers
        assert (engine.submissions, held(rig)) == ([], 0)


async def test_whoever_leaves_or_is_refused_later_holds_no_slot() -> None:
    engine = ScriptedEngine()
    async with deployed(engine, tables=limited(4)) as rig:
        engine.gate.clear()
        asking = asyncio.create_task(ask(rig, ["a", "b"], best_of=2))
        async with asyncio.timeout(10):
            while engine.num_running < 2:
                await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await asking
        await until_all_is_given_back(rig)
        engine.gate.set()
        # The second prompt is too long, after the slots of both have been taken.
        assert (await ask(rig, ["a", "b" * 5000], n=2)).status_code == 400
        await until_all_is_given_back(rig)


async def test_over_grpc_branches_are_streams_as_well() -> None:
    engine = ScriptedEngine()
    request = inference_pb2.GenerateRequest(model="tiny", text="a")
    request.sampling.best_of, request.sampling.temperature = 3, 1.0
    async with deployed(engine, tables=limited(4)) as rig:
        engine.gate.clear()
        call = rig.inference.Generate(request, metadata=METADATA)
        asking = asyncio.create_task(call.read())
        async with asyncio.timeout(10):
            while engine.num_running < 1:
                await asyncio.sleep(0.001)
        assert held(rig) == 3
        assert (await ask(rig, n=2)).status_code == 429
        asking.cancel()
        call.cancel()
        await until_all_is_given_back(rig)
        request.sampling.best_of = 5
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await rig.inference.Generate(request, metadata=METADATA).read()
        error = from_rpc_error(raised.value)
        assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, "sampling.best_of")
