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
from tests.unit.engine.adapters.broken import BROKEN, configured, one_value
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


async def answer(
    gateway: Gateway, handle: int, adapter: str, version: str = ""
) -> engine_pb2.RequestOutput | list[int]:
    """Tokens, or the failure."""
    await gateway.submit(handle, PROMPT, adapter=adapter, version=version, max_tokens=8, temperature=0.0)
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


@pytest.mark.parametrize("kind", BROKEN)
async def test_what_can_never_be_served_is_refused_when_it_is_added(
    engine: Engine, gateway: Gateway, tmp_path: Path, kind: str
) -> None:
    damage, words = BROKEN[kind]
    await gateway.submit(2, PROMPT, adapter="pirate", max_tokens=8, temperature=0.0)
    folder = tmp_path / "broken"
    shutil.copytree(SHIPPED / "pirate", folder)
    damage(folder)
    path = str(folder)
    for call in (
        engine.stub.CheckAdapter(engine_pb2.CheckAdapterRequest(path=path)),
        engine.stub.AddAdapter(engine_pb2.AddAdapterRequest(name="broken", path=path)),
    ):
        reason, where, message = await refusal(call)
        assert (reason, where) == (Reason.INVALID_ARGUMENT, "path")
        assert words in message
        assert path in message
        assert ";" in message, "a remedy"
    # Nothing came of it, and streams go on.
    await gateway.submit(3, PROMPT, adapter="broken")
    outputs = await gateway.until_ended(2)
    assert len(tokens(outputs[2, 0])) == 8
    assert outputs[3, 0][-1].error.reason == Reason.MODEL_NOT_FOUND


@pytest.mark.parametrize(
    ("name", "path", "field", "words"),
    [
        ("gone", "/nowhere", "path", "there is no adapter_config.json"),
        ("a/b", str(SHIPPED / "pirate"), "name", "letters, digits"),
        ("a#2", str(SHIPPED / "pirate"), "name", "letters, digits"),
        ("a\0b", str(SHIPPED / "pirate"), "name", "letters, digits"),
        ("empty", "", "path", "it is empty"),
        ("nul", f"{SHIPPED}/pirate\0", "path", "NUL"),
        ("long", "/" + "x" * 5000, "path", "give a folder"),
        ("file", str(SHIPPED / "pirate" / "adapter_config.json"), "path", "give a folder"),
    ],
)
async def test_names_and_paths_that_cannot_be_are_refused_by_their_fields(
    engine: Engine, name: str, path: str, field: str, words: str
) -> None:
    request = engine_pb2.AddAdapterRequest(name=name, path=path)
    reason, where, message = await refusal(engine.stub.AddAdapter(request))
    assert (reason, where) == (Reason.INVALID_ARGUMENT, field)
    assert words in message


async def test_gateways_hear_of_changes_and_a_name_stands_for_its_newest_adapter(
    engine: Engine, gateway: Gateway, tmp_path: Path
) -> None:
    folder = tmp_path / "poet"
    shutil.copytree(SHIPPED / "pirate", folder)
    add = engine_pb2.AddAdapterRequest(name="poet", path=str(folder))
    await engine.stub.AddAdapter(add)
    while "poet" not in (heard := (await gateway.read()).adapters).served:
        pass
    first = {each.name: each for each in heard.names}["poet"]
    expected = {name: await answer(gateway, index, name) for index, name in enumerate(("", "pirate"), 1)}
    # Twice, so that its keys and values are in the cache.
    assert [await answer(gateway, handle, "poet") for handle in (3, 4)] == [expected["pirate"]] * 2
    shutil.rmtree(folder)
    shutil.copytree(SHIPPED / "entries", folder)
    await engine.stub.AddAdapter(add)
    again = await answer(gateway, 5, "poet")
    assert again not in expected.values()
    # What was on its way when the name changed is computed with what it asked for, and nothing else.
    assert await answer(gateway, 6, "poet", first.version) == expected["pirate"]
    other = await answer(gateway, 7, "poet", "0" * 32)
    assert isinstance(other, engine_pb2.RequestOutput)
    assert (other.error.reason, other.error.field) == (Reason.MODEL_NOT_FOUND, "adapter")
    remove = engine_pb2.RemoveAdapterRequest(name="poet")
    await engine.stub.RemoveAdapter(remove)
    assert isinstance(await answer(gateway, 8, "poet"), engine_pb2.RequestOutput)
    reason, _, _ = await refusal(engine.stub.RemoveAdapter(remove))
    assert reason is Reason.MODEL_NOT_FOUND


async def test_of_two_changes_of_a_name_the_newer_holds_in_whatever_order_they_come(
    engine: Engine, gateway: Gateway
) -> None:
    checked = {
        name: (
            await engine.stub.CheckAdapter(engine_pb2.CheckAdapterRequest(path=str(SHIPPED / name)))
        ).version
        for name in ("pirate", "entries")
    }
    expected = {name: await answer(gateway, index, name) for index, name in enumerate(("", "pirate"), 1)}

    async def add(folder: str, version: str, generation: int) -> None:
        path = str(SHIPPED / folder)
        await engine.stub.AddAdapter(
            engine_pb2.AddAdapterRequest(name="either", path=path, version=version, generation=generation)
        )

    await add("pirate", checked["pirate"], 7)
    await add("entries", checked["entries"], 5)
    assert await answer(gateway, 3, "either") == expected["pirate"]
    with pytest.raises(grpc.aio.AioRpcError, match="has changed since the adapter was added"):
        await add("entries", "0" * 32, 8)
    await engine.stub.RemoveAdapter(engine_pb2.RemoveAdapterRequest(name="either", generation=9))
    await add("entries", checked["entries"], 8)
    assert isinstance(await answer(gateway, 4, "either"), engine_pb2.RequestOutput)


async def test_files_that_changed_are_told_as_what_no_retry_mends(
    engine: Engine, gateway: Gateway, tmp_path: Path
) -> None:
    shutil.copytree(SHIPPED / "entries", tmp_path / "late")
    # Not the same adapter as "entries", whose files stay.
    configured(lora_alpha=12)(tmp_path / "late")
    await engine.stub.AddAdapter(engine_pb2.AddAdapterRequest(name="late", path=str(tmp_path / "late")))
    one_value("A", 0.5)(tmp_path / "late")
    refused = await answer(gateway, 1, "late")
    assert isinstance(refused, engine_pb2.RequestOutput)
    assert (refused.error.reason, refused.error.field) == (Reason.MODEL_NOT_FOUND, "adapter")
    assert (
        f"{tmp_path / 'late'} has changed since the adapter was added; add it again" in refused.error.message
    )
