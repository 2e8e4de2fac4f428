"""What goes together, who waits for whom, and how an outbox ends."""

from __future__ import annotations

import asyncio

import pytest

from contract.errors import MillraceError, Reason
from runtime.streams import MAX_TOGETHER_BYTES, Outbox, OutboxFull


def outbox(**options: int | None) -> Outbox[bytes]:
    return Outbox(len, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sizes", "first"),
    [
        ([10], 1),
        ([10] * 20, 8),
        ([200_000, 100_000], 1),
        ([500_000, 10], 1),
        ([10, 500_000], 1),
        ([100_000, 100_000, 100_000], 2),
    ],
)
async def test_few_and_small_items_go_together(sizes: list[int], first: int) -> None:
    waiting = outbox()
    for size in sizes:
        waiting.put(bytes(size))
    assert len(await waiting.drain()) == first
    assert len(waiting) == len(sizes) - first


async def test_how_many_go_together_is_the_stream_s_choice() -> None:
    for max_together, first in ((1, 1), (None, 100)):
        waiting = outbox(max_together=max_together)
        for _ in range(100):
            waiting.put(b"x")
        assert len(await waiting.drain()) == first
    waiting = outbox(max_together=None)
    for _ in range(3):
        waiting.put(bytes(MAX_TOGETHER_BYTES // 2))
    assert len(await waiting.drain()) == 2


async def test_what_is_put_in_one_turn_goes_together() -> None:
    waiting = outbox()
    taking = asyncio.create_task(waiting.drain())
    await asyncio.sleep(0)
    waiting.put(b"a")
    waiting.put(b"b")
    assert await taking == [b"a", b"b"]


async def test_everything_is_flushed_when_the_last_write_is_accepted() -> None:
    waiting = outbox()
    assert waiting.is_flushed
    waiting.put(b"a")
    assert not waiting.is_flushed
    await waiting.drain()
    assert not waiting.is_flushed
    # The writer comes back for more when the transport has taken what it had.
    taking = asyncio.create_task(waiting.drain())
    await asyncio.sleep(0)
    assert waiting.is_flushed
    taking.cancel()


async def test_a_peer_that_takes_nothing_does_not_fill_the_memory() -> None:
    waiting = outbox(max_waiting=3)
    for item in (b"1", b"2", b"3"):
        waiting.put(item)
    with pytest.raises(OutboxFull):
        waiting.put(b"4")
    assert await waiting.drain() == [b"1", b"2", b"3"]
    waiting.put(b"5")


async def test_the_bytes_that_wait_are_bounded() -> None:
    waiting = outbox(max_waiting_bytes=100, max_together=1)
    # One goes however large it is.
    waiting.put(bytes(200))
    with pytest.raises(OutboxFull):
        waiting.put(b"x")
    await waiting.drain()
    waiting.put(bytes(60))
    with pytest.raises(OutboxFull):
        waiting.put(bytes(60))
    waiting.put(bytes(40))
    assert waiting.num_bytes == 100


async def test_what_is_discarded_is_not_taken() -> None:
    waiting = outbox(max_together=1)
    tickets = [waiting.put(item) for item in (b"1", b"22", b"333")]
    assert waiting.discard(tickets[1])
    assert not waiting.discard(tickets[1])
    assert waiting.num_bytes == 4
    assert [await waiting.drain(), await waiting.drain()] == [[b"1"], [b"333"]]
    assert not waiting.discard(tickets[0])
    assert waiting.num_bytes == 0


async def test_what_waits_is_taken_before_the_end() -> None:
    waiting = outbox(max_together=1)
    waiting.put(b"a")
    waiting.close()
    assert [await waiting.drain(), await waiting.drain()] == [[b"a"], []]
    failed = outbox()
    failed.put(b"a")
    failed.close(MillraceError(Reason.ENGINE_LOST, "the core"))
    # The first reason stays.
    failed.close()
    assert await failed.drain() == [b"a"]
    with pytest.raises(MillraceError, match="the core"):
        await failed.drain()


async def test_a_writer_that_waits_is_told_of_the_end() -> None:
    waiting = outbox()
    taking = asyncio.create_task(waiting.drain())
    await asyncio.sleep(0)
    waiting.close()
    assert await taking == []


async def test_another_writer_goes_on_where_one_was_cancelled() -> None:
    waiting = outbox()
    taking = asyncio.create_task(waiting.drain())
    await asyncio.sleep(0)
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    waiting.put(b"a")
    assert await waiting.drain() == [b"a"]
