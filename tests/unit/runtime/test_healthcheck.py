"""The health check of containers: what it says, and when."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runtime import healthcheck
from runtime.server import LIVE, GrpcServer

# Longer than any test may take.
_HOLD = ("--hold", "600")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
async def server() -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1:0")
    await server.start()
    yield server
    await server.stop(0)


async def _ask(*arguments: str) -> int:
    return await asyncio.to_thread(healthcheck.main, list(arguments))


async def test_a_process_is_live_before_it_serves(server: GrpcServer) -> None:
    address = f"127.0.0.1:{server.port}"
    assert await _ask(address) == 1
    assert await _ask(address, LIVE) == 0
    await server.set_serving(True)
    assert await _ask(address) == 0


async def test_what_holds_its_answer_ends_with_the_first_news(server: GrpcServer) -> None:
    address = f"127.0.0.1:{server.port}"
    starts = asyncio.create_task(_ask(address, *_HOLD))
    done, _ = await asyncio.wait([starts], timeout=0.2)
    assert not done
    await server.set_serving(True)
    assert await starts == 0
    leaves = asyncio.create_task(_ask(address, *_HOLD))
    done, _ = await asyncio.wait([leaves], timeout=0.2)
    assert not done
    await server.set_serving(False)
    assert await leaves == 1


async def test_an_answer_is_not_held_for_ever(server: GrpcServer) -> None:
    address = f"127.0.0.1:{server.port}"
    await server.set_serving(True)
    assert [await _ask(address, "--hold", "0.01") for _ in range(2)] == [0, 0]


async def test_nobody_listens_yet() -> None:
    assert await _ask("127.0.0.1:1") == 1
