"""Random walks over the memory store's clock: no minute ever holds more than the limit."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.limits.store import (
    BUCKET_MS,
    WINDOW_MS,
    Demand,
    Granted,
    LeaseDemand,
    LeaseReturn,
    MemoryLimitStore,
    MeterDemand,
    Settlement,
    WindowChange,
    WindowDemand,
)

LIMIT = 50
STEPS = st.lists(
    st.tuples(st.integers(0, 20_000), st.integers(1, 30), st.none() | st.integers(0, 30)),
    min_size=1,
    max_size=80,
)


@given(STEPS)
@settings(deadline=None)
def test_no_minute_holds_more_than_the_limit(steps: list[tuple[int, int, int | None]]) -> None:
    now_ms = 1_000_000
    store = MemoryLimitStore(lease_ttl_s=30, clock=lambda: now_ms)
    # [moment, tokens that stay charged]
    admitted: list[tuple[int, int]] = []

    async def walk() -> None:
        nonlocal now_ms
        for wait_ms, amount, used in steps:
            now_ms += wait_ms
            outcome = await store.acquire(Demand(windows=(WindowDemand("w", LIMIT, amount),)))
            if not isinstance(outcome, Granted):
                in_window = sum(
                    tokens for moment, tokens in admitted if moment > now_ms - WINDOW_MS - BUCKET_MS
                )
                assert in_window + amount > LIMIT, "refused although it would have fitted"
                if outcome.retry_after_ms is not None:
                    await _fits_after(outcome.retry_after_ms, amount)
                continue
            spent = amount if used is None else min(used, amount)
            await store.settle(Settlement(windows=(WindowChange("w", outcome.bucket, spent - amount),)))
            admitted.append((now_ms, spent))

    async def _fits_after(wait_ms: int, amount: int) -> None:
        later = MemoryLimitStore(lease_ttl_s=30, clock=lambda: now_ms + wait_ms)
        later._windows = {
            key: type(window)(type(window.charges)([list(charge) for charge in window.charges]), window.total)
            for key, window in store._windows.items()
        }
        assert isinstance(await later.acquire(Demand(windows=(WindowDemand("w", LIMIT, amount),))), Granted)

    asyncio.run(walk())
    for begin, _ in admitted:
        held = sum(tokens for moment, tokens in admitted if begin <= moment < begin + WINDOW_MS)
        assert held <= LIMIT


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20), st.integers(0, 3)), max_size=60))
@settings(deadline=None)
def test_meter_never_passes_its_limit_and_wastes_less_than_one_unit(
    demands: list[tuple[int, int, int]],
) -> None:
    store = MemoryLimitStore(lease_ttl_s=30)

    async def walk() -> None:
        used = 0
        for base, units, cost in demands:
            outcome = await store.acquire(Demand(meters=(MeterDemand("m", 100, base, cost, units),)))
            if isinstance(outcome, Granted):
                (got,) = outcome.meter_units
                used += base + got * cost
                assert outcome.meter_sums == (used,)
                assert used <= 100
                assert got == units or used + cost > 100
            else:
                assert used >= 100 or used + base + (cost if units else 0) > 100

    asyncio.run(walk())


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 5), st.booleans()), max_size=60))
@settings(deadline=None)
def test_never_more_leases_than_slots(steps: list[tuple[int, int, bool]]) -> None:
    now_ms = 0
    store = MemoryLimitStore(lease_ttl_s=30, clock=lambda: now_ms)

    async def walk() -> None:
        nonlocal now_ms
        # By lease: its slots, and the moment at which they lapse.
        held: dict[LeaseReturn, tuple[int, int]] = {}
        for number, (wait_ms, slots, returns) in enumerate(steps):
            now_ms += wait_ms
            held = {lease: of for lease, of in held.items() if of[1] > now_ms}
            demand = LeaseDemand("l", 4, str(number), slots)
            outcome = await store.acquire(Demand(leases=(demand,)))
            used = sum(of[0] for of in held.values())
            assert isinstance(outcome, Granted) == (used + slots <= 4)
            if isinstance(outcome, Granted):
                held[demand.given_back] = slots, now_ms + 30_000
            if returns and held:
                first = next(iter(held))
                await store.settle(Settlement(leases=(first,)))
                del held[first]

    asyncio.run(walk())
