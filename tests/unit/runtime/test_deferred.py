"""What nobody waits for is done, in order, together, and without holding up the event loop."""

from __future__ import annotations

import asyncio
import logging

import pytest

from runtime.deferred import Deferred


async def test_calls_are_made_later_and_in_their_order() -> None:
    done: list[int] = []
    ended = asyncio.Event()
    deferred = Deferred(0.001)
    for number in range(3):
        deferred.call(done.append, number)
    deferred.call(ended.set)
    assert done == []
    await ended.wait()
    assert done == [0, 1, 2]
    # And again, once everything of before is done.
    ended.clear()
    deferred.call(done.append, 3)
    deferred.call(ended.set)
    await ended.wait()
    assert done == [0, 1, 2, 3]


async def test_a_flush_leaves_nothing() -> None:
    done: list[int] = []
    deferred = Deferred(3600.0)
    for number in range(100):
        deferred.call(done.append, number)
    deferred.flush()
    assert done == list(range(100))


async def test_others_have_their_turn_between() -> None:
    done: list[str] = []
    ended = asyncio.Event()
    deferred = Deferred(0.0)
    deferred.call(lambda: asyncio.get_running_loop().call_soon(done.append, "other"))
    for _ in range(200):
        deferred.call(done.append, "mine")
    deferred.call(ended.set)
    await ended.wait()
    assert 0 < done.index("other") < 200


async def test_a_failure_hinders_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    deferred = Deferred()

    def fail() -> None:
        raise ValueError("of one request")

    deferred.call(fail)
    deferred.call(done.append, 1)
    with caplog.at_level(logging.ERROR):
        deferred.flush()
    assert done == [1]
    assert "of one request" in caplog.text
