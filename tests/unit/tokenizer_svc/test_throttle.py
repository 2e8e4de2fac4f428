"""How fast one tenant may send large requests."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import MillraceError, Reason
from tests.unit.tokenizer_svc.test_accounts import Clock
from tokenizer_svc.service.throttle import Throttle


def test_who_sends_more_than_allowed_waits_and_nobody_else_does() -> None:
    clock = Clock()
    pace = Throttle(burst_bytes=100, bytes_per_s=10, clock=clock)
    assert pace.wait_s("a", 5000) == 0
    # 500 s at the allowed rate, of which a burst may be ahead.
    assert pace.wait_s("a", 10) == 490
    assert pace.wait_s("a", 10) == 491
    assert pace.wait_s("b", 10) == 0
    clock.now_s += 502
    assert pace.wait_s("a", 100) == 0
    assert pace.wait_s("a", 100) == 0
    assert pace.wait_s("a", 100) == 10


@given(
    sent=st.lists(
        st.tuples(st.integers(min_value=1, max_value=1000), st.floats(min_value=0, max_value=20)),
        max_size=50,
    )
)
def test_the_long_run_is_bounded(sent: list[tuple[int, float]]) -> None:
    """Whoever waits as told has sent at most a burst and one request more than the rate allows."""
    clock = Clock()
    pace = Throttle(burst_bytes=100, bytes_per_s=10, clock=clock)
    total = 0
    for num_bytes, pause_s in sent:
        clock.now_s += pause_s
        clock.now_s += pace.wait_s("a", num_bytes)
        assert total <= 100 + 10 * clock.now_s + 1e-6
        total += num_bytes


def test_tenants_that_are_even_are_forgotten() -> None:
    clock = Clock()
    pace = Throttle(burst_bytes=100, bytes_per_s=10, clock=clock)
    for number in range(1000):
        pace.wait_s(f"t{number}", 10)
        clock.now_s += 1.0
    assert len(pace._even_s) < 300


async def test_what_waits_of_a_tenant_is_bounded() -> None:
    pace = Throttle(burst_bytes=1, bytes_per_s=0.1, max_waiting_bytes=100)
    await pace.wait("a", 1000)
    waiting = [asyncio.ensure_future(pace.wait("a", 50)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        with pytest.raises(MillraceError, match="100 bytes wait") as refused:
            await pace.wait("a", 1)
    assert refused.value.reason is Reason.QUEUE_LIMIT_EXCEEDED
    # Others are not in its way, nor is what has been given up.
    await pace.wait("b", 1000)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert not pace._waiting
    again = asyncio.ensure_future(pace.wait("a", 100))
    await asyncio.sleep(0)
    assert not again.done()
    again.cancel()
