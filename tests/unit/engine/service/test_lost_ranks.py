"""A rank of a real engine is lost: every stream ends so that it goes on elsewhere, and no process stays."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

import grpc
import psutil
import pytest
from millrace.engine.v1 import engine_pb2

from checkpoint.vocabulary import checkpoint_fingerprint
from contract.errors import Reason
from contract.proto.status import from_rpc_error
from kernels.native.library import NativeUnavailableError, load_native
from tests.unit.engine.adapters.broken import one_value
from tests.unit.engine.service.engine_client import ROOT, Gateway, start_engine, tokens

BUNDLED = ROOT / "models/millrace-nano"
PROMPT = list(range(300, 340))
SETTINGS = {
    "SIMULATED": "false",
    "NATIVE": "required",
    "NUM_THREADS": "2",
    "CACHE__KV_CACHE_BYTES": str(32 << 20),
}
RANKS = {"PARALLEL__TENSOR": "2"}
STAGES = {"PARALLEL__PIPELINE": "2"}

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Engines after the first of a kind read what that packed: none of them imports torch."""
    kept = {
        "PACKED_WEIGHTS__PATH": str(tmp_path_factory.mktemp("packed")),
        "PACKED_WEIGHTS__MIN_BYTES": "0",
    }
    return SETTINGS | kept


def ranks_of(core_pid: int) -> list[psutil.Process]:
    """The ranks behind the first."""
    children = psutil.Process(core_pid).children()
    return [each for each in children if "engine.runner.ranks.worker" in each.cmdline()]


async def greedy(settings: dict[str, str]) -> list[int]:
    async with start_engine(str(BUNDLED), **settings) as engine:
        gateway = Gateway(engine, checkpoint_fingerprint(str(BUNDLED)))
        await gateway.hello()
        await gateway.submit(1, PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
        outputs = await gateway.until_ended(1)
        books = await engine.wait_until_idle()
        assert books.ok, books.violation
        assert books.num_unreferenced_blocks == books.num_total_blocks
        processes = ranks_of(engine.core_pid)
        assert len(processes) == int(settings.get("PARALLEL__TENSOR", "1")) - 1
    # After SIGTERM nobody stays.
    assert not [each for each in processes if each.is_running()]
    return tokens(outputs[1, 0])


async def test_an_engine_of_two_ranks_answers_as_one_of_one(settings: dict[str, str]) -> None:
    assert await greedy(settings | RANKS) == await greedy(settings)


async def under_adapters(settings: dict[str, str], broken: Path) -> list[list[int]]:
    """Answers of the plain model and of both bundled adapters, which take turns in the only slot; then one is
    refused when it is added, one removed, and added again under another name.
    """
    names = ["", "pirate", "entries", "pirate", ""]
    async with start_engine(str(BUNDLED), **settings, ADAPTERS__SLOTS="1") as engine:
        gateway = Gateway(engine, checkpoint_fingerprint(str(BUNDLED)))
        assert set((await gateway.hello()).adapters) == {"pirate", "entries"}
        for handle, name in enumerate(names):
            await gateway.submit(handle, PROMPT, adapter=name, max_tokens=20, temperature=0.0)
        outputs = await gateway.until_ended(len(names))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await engine.stub.AddAdapter(engine_pb2.AddAdapterRequest(name="broken", path=str(broken)))
        assert from_rpc_error(refused.value).reason is Reason.INVALID_ARGUMENT
        await engine.stub.RemoveAdapter(engine_pb2.RemoveAdapterRequest(name="pirate"))
        path = str(BUNDLED / "adapters/pirate")
        await engine.stub.AddAdapter(engine_pb2.AddAdapterRequest(name="other", path=path))
        await gateway.submit(9, PROMPT, adapter="other", max_tokens=20, temperature=0.0)
        outputs |= await gateway.until_ended(1)
        books = await engine.wait_until_idle()
        assert books.ok, books.violation
    return [tokens(outputs[handle, 0]) for handle in (*range(len(names)), 9)]


async def test_adapters_of_an_engine_of_several_ranks(settings: dict[str, str], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(BUNDLED / "adapters/pirate", broken)
    one_value("B", float("nan"))(broken)
    alone = await under_adapters(settings, broken)
    assert alone[1] == alone[3] == alone[5]
    assert len({tuple(each) for each in alone[:3]}) == 3
    for ranks in (RANKS, STAGES):
        assert await under_adapters(settings | ranks, broken) == alone


@pytest.mark.parametrize(
    ("number", "ranks"), [(signal.SIGKILL, RANKS), (signal.SIGSTOP, STAGES)], ids=["killed", "stopped"]
)
async def test_a_lost_rank_ends_every_stream_and_the_process(
    number: signal.Signals, ranks: dict[str, str], settings: dict[str, str]
) -> None:
    before = set(os.listdir("/dev/shm"))
    async with start_engine(str(BUNDLED), **settings, **ranks) as engine:
        gateway = Gateway(engine, checkpoint_fingerprint(str(BUNDLED)))
        await gateway.hello()
        await gateway.submit(1, PROMPT, max_tokens=4000, ignore_eos=True)
        await gateway.until_begun()
        (rank,) = ranks_of(engine.core_pid)
        rank.send_signal(number)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await gateway.until_ended(1)
        assert from_rpc_error(lost.value).reason is Reason.ENGINE_LOST
        assert await asyncio.wait_for(engine.process.wait(), 30) == 70
        async with asyncio.timeout(30):
            while rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE:
                await asyncio.sleep(0.05)
    assert set(os.listdir("/dev/shm")) <= before


async def test_a_rank_that_dies_while_nothing_is_asked_ends_the_engine(settings: dict[str, str]) -> None:
    async with start_engine(str(BUNDLED), **settings, **RANKS) as engine:
        (rank,) = ranks_of(engine.core_pid)
        rank.kill()
        assert await asyncio.wait_for(engine.process.wait(), 30) == 70
