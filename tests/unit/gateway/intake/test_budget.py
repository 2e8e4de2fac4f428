"""Room for calls under way: who waits for whom, and what is refused."""

from __future__ import annotations

import asyncio

import pytest

from contract.errors import MillraceError, Reason
from gateway.intake.budget import ByteBudget


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_tenant_alone_has_half_and_the_next_finds_room() -> None:
    budget = ByteBudget(max_bytes=100)
    for _ in range(5):
        await budget.acquire("a", 10)
    waiting = asyncio.ensure_future(budget.acquire("a", 10))
    await settled()
    assert not waiting.done()
    # Another one does not wait for it.
    await budget.acquire("b", 25)
    # Nor does somebody whose call is small where others wait for more.
    await budget.acquire("c", 5)
    budget.release("a", 10)
    await settled()
    assert not waiting.done()
    for tenant, num_bytes in (("b", 25), ("c", 5)):
        budget.release(tenant, num_bytes)
    await asyncio.wait_for(waiting, 10)


async def test_one_call_fits_however_large() -> None:
    budget = ByteBudget(max_bytes=100)
    await budget.acquire("a", 1000)
    waiting = asyncio.ensure_future(budget.acquire("b", 1000))
    await settled()
    assert not waiting.done()
    budget.release("a", 1000)
    await asyncio.wait_for(waiting, 10)


async def test_tenants_are_admitted_in_turn() -> None:
    budget = ByteBudget(max_bytes=10)
    await budget.acquire("x", 10)
    admitted: list[str] = []

    async def ask(tenant: str) -> None:
        await budget.acquire(tenant, 10)
        admitted.append(tenant)
        await settled()
        budget.release(tenant, 10)

    asked = [asyncio.ensure_future(ask(tenant)) for tenant in "aaabc"]
    await settled()
    budget.release("x", 10)
    await asyncio.wait_for(asyncio.gather(*asked), 10)
    assert admitted == ["a", "b", "c", "a", "a"]


async def test_what_waits_is_bounded_and_the_others_may_still_wait() -> None:
    budget = ByteBudget(max_bytes=10, max_waiting_bytes=100)
    await budget.acquire("x", 10)
    waiting = [asyncio.ensure_future(budget.acquire("a", 10)) for _ in range(5)]
    await settled()
    with pytest.raises(MillraceError) as refused:
        await budget.acquire("a", 10)
    assert (refused.value.reason, refused.value.field) == (Reason.QUEUE_LIMIT_EXCEEDED, "input")
    assert "50 bytes wait" in refused.value.message
    waiting.append(asyncio.ensure_future(budget.acquire("b", 10)))
    await settled()
    assert not any(each.done() for each in waiting)
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("is_admitted", [False, True])
async def test_whoever_gives_up_leaves_its_room_to_others(is_admitted: bool) -> None:
    budget = ByteBudget(max_bytes=10)
    await budget.acquire("x", 10)
    given_up = asyncio.ensure_future(budget.acquire("a", 10))
    kept = asyncio.ensure_future(budget.acquire("b", 10))
    await settled()
    if is_admitted:
        # Admitted, and cancelled before it runs.
        budget.release("x", 10)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    if not is_admitted:
        budget.release("x", 10)
    await asyncio.wait_for(kept, 10)
