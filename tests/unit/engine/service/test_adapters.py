"""Adapters of a real engine over a real socket: asked for by name, added and removed while others stream."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from millrace.engine.v1 import engine_pb2

from checkpoint.vocabulary import checkpoint_fingerprint
from contract.errors import Reason
from contract.proto.status import from_rpc_error
from tests.unit.engine.service.engine_client import Engine, Gateway, start_engine, tokens

BASE = "models/millrace-nano"
SHIPPED = Path("models/millrace-nano/adapters").resolve()
PROMPT = list(range(100, 140))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Engine]:
    settings = {"adapters__paths__pirate": str(SHIPPED / "pirate"), "adapters__slots": "1"}
    async with start_engine(BASE, simulated="false", **settings) as started:
        yield started


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(engine: Engine) -> AsyncIterator[Gateway]:
    attached = Gateway(engine, checkpoint_fingerprint(BASE))
    info = await attached.hello()
    assert "pirate" in info.adapters
    yield attached
    attached.call.cancel()
    books = await engine.wait_until_idle()
    assert books.ok, books.violation


async def answer(gateway: Gateway, handle: int, adapter: str) -> engine_pb2.RequestOutput | list[int]:
    """Tokens, or the failure."""
    await gateway.submit(handle, PROMPT, adapter=adapter, max_tokens=8, temperature=0.0)
    outputs = (await gateway.until_ended(1))[handle, 0]
    return outputs[-1] if outputs[-1].HasField("error") else tokens(outputs)


async def refusal(call: grpc.aio.UnaryUnaryCall) -> tuple[Reason, str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    error = from_rpc_error(refused.value)
    return error.reason, error.field, error.message


async def test_more_adapters_than_slots_answer_as_they_do_alone(engine: Engine, gateway: Gateway) -> None:
    await engine.stub.AddAdapter(engine_pb2.AddAdapterRequest(name="entries", path=str(SHIPPED / "entries")))
    alone = {
        name: await answer(gateway, index, name) for index, name in enumerate(("", "pirate", "entries"), 1)
    }
    assert len({tuple(each) for each in alone.values()}) == 3
    names = ["pirate", "", "entries", "pirate", "entries", ""]
    for handle, name in enumerate(names, 10):
        await gateway.submit(handle, PROMPT, adapter=name, max_tokens=8, temperature=0.0)
    outputs = await gateway.until_ended(len(names))
    for handle, name in enumerate(names, 10):
        assert tokens(outputs[handle, 0]) == alone[name]
    delayed = [outputs[handle, 0][-1].statistics.delayed_by_s for handle in range(10, 16)]
    assert any("cold_adapter" in each for each in delayed)
    listed = (await engine.stub.ListAdapters(engine_pb2.ListAdaptersRequest())).adapters
    assert [each.name for each in listed] == ["entries", "pirate"]
    assert sum(each.loaded for each in listed) == 1


async def test_an_unknown_adapter_is_refused_with_those_that_are_served(gateway: Gateway) -> None:
    refused = await answer(gateway, 1, "poems")
    assert isinstance(refused, engine_pb2.RequestOutput)
    assert (refused.error.reason, refused.error.field) == (Reason.MODEL_NOT_FOUND, "adapter")
    assert "'poems' is not served; this engine serves" in refused.error.message
    assert "pirate" in refused.error.message


async def test_what_cannot_be_served_is_refused_and_streams_go_on(
    engine: Engine, gateway: Gateway, tmp_path: Path
) -> None:
    expected = await answer(gateway, 1, "pirate")
    await gateway.submit(2, PROMPT, adapter="pirate", max_tokens=8, temperature=0.0)
    cut = tmp_path / "cut"
    shutil.copytree(SHIPPED / "pirate", cut)
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    for name, path, field, words in (
        ("cut", str(cut), "path", "cut short"),
        ("gone", str(tmp_path / "gone"), "path", "there is no adapter_config.json"),
        ("a/b", str(cut), "name", "letters, digits"),
        ("empty", "", "path", "it is empty"),
    ):
        request = engine_pb2.AddAdapterRequest(name=name, path=path)
        reason, where, message = await refusal(engine.stub.AddAdapter(request))
        assert (reason, where) == (Reason.INVALID_ARGUMENT, field)
        assert words in message
    assert tokens((await gateway.until_ended(1))[2, 0]) == expected


async def test_gateways_hear_of_changes_and_a_name_stands_for_its_newest_adapter(
    engine: Engine, gateway: Gateway, tmp_path: Path
) -> None:
    folder = tmp_path / "poet"
    shutil.copytree(SHIPPED / "pirate", folder)
    add = engine_pb2.AddAdapterRequest(name="poet", path=str(folder))
    await engine.stub.AddAdapter(add)
    while "poet" not in (await gateway.read()).adapters.served:
        pass
    expected = {name: await answer(gateway, index, name) for index, name in enumerate(("", "pirate"), 1)}
    # Twice, so that its keys and values are in the cache.
    assert [await answer(gateway, handle, "poet") for handle in (3, 4)] == [expected["pirate"]] * 2
    shutil.copytree(SHIPPED / "entries", folder, dirs_exist_ok=True)
    await engine.stub.AddAdapter(add)
    again = await answer(gateway, 5, "poet")
    assert again not in expected.values()
    remove = engine_pb2.RemoveAdapterRequest(name="poet")
    await engine.stub.RemoveAdapter(remove)
    assert isinstance(await answer(gateway, 6, "poet"), engine_pb2.RequestOutput)
    reason, _, _ = await refusal(engine.stub.RemoveAdapter(remove))
    assert reason is Reason.MODEL_NOT_FOUND
