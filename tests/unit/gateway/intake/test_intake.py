"""Large requests hold bounded memory, by tenant and in all, and take turns."""

from __future__ import annotations

import asyncio

import pytest

from contract.errors import MillraceError, Reason
from gateway.config import RequestConfig
from gateway.engines.mailbox import Backlog, Mailbox
from gateway.intake import intake as intake_module
from gateway.intake.intake import Intake, Slices, SliceThrottle
from runtime import memory


@pytest.fixture
def intake() -> Intake:
    return Intake(RequestConfig(max_held_bytes=1000))


async def test_a_tenant_holds_as_much_as_is_left_free_after_it(intake: Intake) -> None:
    with intake.lease("a") as first, intake.lease("a") as second:
        first.grow(400)
        with pytest.raises(MillraceError) as refused:
            second.grow(250)
        assert refused.value.reason is Reason.QUEUE_LIMIT_EXCEEDED
        assert "max_held_bytes" in refused.value.message
        with intake.lease("b") as other:
            other.grow(300)
            with intake.lease("c") as third:
                third.grow(100)
                # What is left is less than what comes: not this tenant's doing.
                with intake.lease("d") as last, pytest.raises(MillraceError) as full:
                    last.grow(250)
                assert (full.value.reason, full.value.mapping.http_status) == (Reason.GATEWAY_FULL, 503)
    with intake.lease("a") as again:
        again.grow(500)


async def test_bodies_that_come_bit_by_bit_are_held_bit_by_bit(intake: Intake) -> None:
    with intake.lease("a") as hold:
        for _ in range(5):
            hold.grow(100)
        with pytest.raises(MillraceError):
            hold.grow(100)
    with intake.lease("b") as other:
        other.grow(500)


async def test_a_body_counts_with_what_is_made_of_it(intake: Intake) -> None:
    with intake.lease("a") as hold:
        hold.grow_by_body(250)
        with pytest.raises(MillraceError):
            hold.grow_by_body(1)


async def test_memory_is_given_back_once_large_requests_have_ended(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(memory, "GIVE_BACK_AFTER_S", 0.0)
    monkeypatch.setattr(memory, "give_back", lambda: loop.call_soon_threadsafe(given_back.set))
    with intake.lease("a") as hold:
        hold.grow(10)
    await asyncio.wait_for(given_back.wait(), 20)


async def test_a_tenant_has_one_large_request_in_work_and_others_their_own(intake: Intake) -> None:
    order: list[str] = []
    proceed = asyncio.Event()

    async def work(tenant: str, name: str) -> None:
        async with intake.exclusive(tenant):
            order.append(name)
            await proceed.wait()

    tasks = [asyncio.ensure_future(work(tenant, f"{tenant}{at}")) for tenant in "ab" for at in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["a0", "b0"]
    proceed.set()
    await asyncio.gather(*tasks)
    assert sorted(order) == ["a0", "a1", "b0", "b1"]


async def test_slices_let_everybody_else_go_on(intake: Intake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "SLICE_S", 0.0)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    async with intake.exclusive("a") as slices:
        for _ in range(100):
            await slices.breathe()
    counting.cancel()
    assert turns >= 99


async def test_large_requests_together_leave_three_quarters_of_the_time_to_others() -> None:
    now_s = 0.0
    waits_s: list[float] = []

    async def sleep(wait_s: float) -> None:
        waits_s.append(wait_s)

    throttle = SliceThrottle(clock=lambda: now_s, sleep=sleep)
    one, other = Slices(throttle), Slices(throttle)
    now_s = 0.001
    await one.breathe()
    assert not waits_s, "a slice is longer"
    now_s = 0.004
    await one.breathe()
    # The other one's slice counts as well, whichever request and tenant it is of.
    await other.rest()
    assert waits_s == pytest.approx([0.012, 0.024])
    now_s = 1.0
    await one.rest()
    assert waits_s[2:] == pytest.approx([3 * (1.0 - 0.004)]), "what nobody used is not kept"


async def test_what_a_reader_leaves_is_bounded_for_it_and_for_its_tenant() -> None:
    backlog = Backlog(max_each=200, max_together=250)
    full: list[str] = []
    one: Mailbox[int] = Mailbox(backlog, weight=10)
    other: Mailbox[int] = Mailbox(backlog, weight=10)
    one.on_full = lambda: full.append("one")
    other.on_full = lambda: full.append("other")
    # The first ones wait for any reader now and then.
    for number in range(64 + 20):
        one.put(number)
    assert not full
    for number in range(64 + 6):
        other.put(number)
    assert full == ["other"]
    # What comes later is not kept, but for the reason.
    other.put(1)
    other.put_last(-1)
    assert await other.take() == [-1]
    one.put(84)
    assert full == ["other", "one"]
    assert backlog.num_together == 0


async def test_a_reader_who_reads_is_never_behind() -> None:
    mailbox: Mailbox[int] = Mailbox(Backlog(max_each=1, max_together=1))
    mailbox.on_full = lambda: pytest.fail("it was read")
    for number in range(500):
        mailbox.put(number)
        assert await mailbox.take() == [number]
