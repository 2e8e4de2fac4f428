"""Reservations: what is charged, what is given back, and what a refusal says."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from msgspec.structs import replace

from contract.errors import MillraceError, Reason
from gateway.auth.directory import KeyDirectory, hash_key
from gateway.limits.counter import RequestLimiter
from gateway.limits.limiter import TokenLimiter
from gateway.limits.prices import Prices
from gateway.limits.store import MemoryLimitStore, Settlement, StoreLostError
from gateway.settings import load_settings
from gateway.tiers import Tiers
from gateway.types.error_form import retry_headers
from gateway.types.request import Identity

NOW_S = 1_790_000_000.0
CHUNK = 100


class SlowStore(MemoryLimitStore):
    """Answers in a later turn of the event loop, as a shared store does."""

    is_immediate = False

    async def settle(self, settlement: Settlement) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        await super().settle(settlement)


class Rig:
    """A limiter over a memory store with a clock of its own."""

    def __init__(
        self,
        tenant: dict[str, Any],
        key: dict[str, Any] | None = None,
        store: type[MemoryLimitStore] = MemoryLimitStore,
    ) -> None:
        self.now_s = NOW_S
        entry = {"id": "k", "tenant": "acme", "hash": hash_key("mr-k"), **(key or {})}
        settings = load_settings(
            {
                "security": {"context_secret": "a secret for unit tests"},
                "gateway": {
                    "limits": {"default_completion_tokens": CHUNK},
                    "prices": {"*": {"prompt": 1.0, "cached_prompt": 0.5, "completion": 4.0}},
                },
                "tiers": {"standard": {"max_concurrency": 3}},
                "tenants": {"acme": tenant},
                "keys": {"entries": [entry]},
            }
        )
        self.store = store(lease_ttl_s=30, clock=lambda: round(self.now_s * 1000))
        self.directory = KeyDirectory(settings)
        self.tier = Tiers(settings).named("standard")
        self.limiter = TokenLimiter(
            self.store,
            self.directory,
            Prices(settings.gateway.prices),
            settings.gateway.limits,
            clock=lambda: self.now_s,
        )
        self.requests = RequestLimiter(self.store, self.directory, clock=lambda: self.now_s)
        self.identity = Identity(request_id="r", tenant="acme", key_id="k", tier="standard")

    async def reserve(self, prompt: int, completion: int | None, num_streams: int = 1) -> Any:
        return await self.limiter.reserve(
            self.identity, prompt, completion, tier=self.tier, model="m", num_streams=num_streams
        )

    async def refusal(self, prompt: int, completion: int | None) -> MillraceError:
        with pytest.raises(MillraceError) as caught:
            await self.reserve(prompt, completion)
        return caught.value


async def test_unlimited_tenant_costs_no_store_call() -> None:
    rig = Rig({})
    reservation = await rig.limiter.reserve(rig.identity, 10, None)
    assert reservation.remaining_completion_budget() is None
    await reservation.settle(10, 5)
    assert rig.store._windows == {}


async def test_settling_gives_the_unused_tokens_back() -> None:
    rig = Rig({"tokens_per_minute": 1000})
    reservation = await rig.reserve(100, 900)
    assert (await rig.refusal(1, 1)).reason is Reason.TOKEN_RATE_EXCEEDED
    await reservation.settle(100, 50)
    await reservation.settle(100, 900)
    await reservation.cancel()
    await rig.reserve(50, 800)
    assert (await rig.refusal(1, 0)).metadata == {"limit": "1000", "used": "1000", "requested": "1"}


async def test_cancelling_gives_everything_back() -> None:
    rig = Rig({"tokens_per_minute": 1000, "max_concurrent_streams": 1, "monthly_tokens": 1000})
    for _ in range(3):
        reservation = await rig.reserve(100, 900)
        await reservation.cancel()


async def test_waiting_for_a_slot_uses_up_no_requests_per_minute() -> None:
    rig = Rig({"requests_per_minute": 5, "max_concurrent_streams": 1}, {"requests_per_minute": 4})

    async def ask() -> Any:
        await rig.requests.admit("acme", "k")
        rig.now_s += 0.7
        return await rig.limiter.reserve(rig.identity, 1, 1, tier=rig.tier, model="m", age_s=0.7)

    running = await ask()
    for _ in range(20):
        with pytest.raises(MillraceError) as refused:
            await ask()
        assert refused.value.reason is Reason.CONCURRENCY_EXCEEDED
    await running.settle(1, 1)
    for _ in range(3):
        await (await ask()).settle(1, 1)
    with pytest.raises(MillraceError) as refused:
        await ask()
    assert refused.value.reason is Reason.REQUEST_RATE_EXCEEDED
    assert refused.value.metadata["scope"] == "key k"


async def test_lines_of_batches_leave_a_part_of_the_limits_to_who_asks_beside_them() -> None:
    rig = Rig({"tokens_per_minute": 1000, "max_concurrent_streams": 4, "requests_per_minute": 2})
    line = replace(rig.identity, in_batch=True)

    async def take(identity: Identity, tokens: int, age_s: float | None = 0.1) -> Any:
        return await rig.limiter.reserve(identity, tokens, 0, model="m", age_s=age_s)

    lines = [await take(line, 10) for _ in range(3)]
    for _ in range(5):
        with pytest.raises(MillraceError) as refused:
            await take(line, 10)
        assert (refused.value.reason, refused.value.retry_after_s) == (Reason.CONCURRENCY_EXCEEDED, 1.0)
    chat = await take(rig.identity, 10)
    # Lines are not among the requests of a minute: a refusal gives none back.
    await rig.requests.admit("acme", "k")
    await rig.requests.admit("acme", "k")
    with pytest.raises(MillraceError):
        await take(line, 10)
    with pytest.raises(MillraceError) as refused:
        await rig.requests.admit("acme", "k")
    assert refused.value.reason is Reason.REQUEST_RATE_EXCEEDED
    for each in (*lines, chat):
        await each.settle(10, 0)
    await (await take(line, 700)).settle(700, 0)
    with pytest.raises(MillraceError) as refused:
        await take(line, 20)
    assert refused.value.reason is Reason.TOKEN_RATE_EXCEEDED
    assert refused.value.retry_after_s is not None
    await take(rig.identity, 250)
    assert rig.limiter.headers(rig.identity)["x-ratelimit-limit-tokens"] == "1000"


async def test_a_line_that_needs_all_of_a_limit_has_it_alone() -> None:
    rig = Rig({"tokens_per_minute": 1000, "max_concurrent_streams": 1})
    line = replace(rig.identity, in_batch=True)
    await rig.limiter.reserve(line, 900, 100, model="m")
    with pytest.raises(MillraceError) as refused:
        await Rig({"tokens_per_minute": 1000}).limiter.reserve(line, 900, 101, model="m")
    assert refused.value.retry_after_s is None


async def test_refusal_says_whose_limit_and_when_to_come_back() -> None:
    rig = Rig({"tokens_per_minute": 1000}, {"tokens_per_minute": 100})
    await rig.reserve(60, 20)
    rig.now_s += 20
    error = await rig.refusal(30, 0)
    assert error.message.startswith("key k has used 80 of 100 tokens")
    # The words and the headers say the same time, after which it is admitted.
    assert error.retry_after_s is not None
    (seconds,) = re.findall(r"retry in (\d+) s or", error.message)
    assert retry_headers(error)["retry-after"] == seconds
    assert error.retry_after_s == pytest.approx(40.5, abs=0.5)
    rig.now_s += error.retry_after_s
    await rig.reserve(30, 0)


async def test_request_larger_than_the_limit_is_not_told_to_retry() -> None:
    error = await Rig({"tokens_per_minute": 100}).refusal(60, 50)
    assert (error.retry_after_s, error.field) == (None, "max_tokens")


async def test_unbounded_answer_is_charged_chunk_by_chunk() -> None:
    rig = Rig({"tokens_per_minute": 350})
    reservation = await rig.reserve(100, None)
    assert rig.limiter.headers(rig.identity)["x-ratelimit-remaining-tokens"] == "150"
    assert reservation.remaining_completion_budget() == 100
    # It may go on beyond the limit, but nobody else is admitted meanwhile.
    for _ in range(3):
        assert await reservation.extend() == CHUNK
    assert (await rig.refusal(1, 1)).metadata["used"] == "500"
    await reservation.settle(100, 240)
    await rig.reserve(5, 5)


async def test_stream_slots_of_tenant_and_tier() -> None:
    rig = Rig({"max_concurrent_streams": 2})
    first = await rig.reserve(1, 1)
    await rig.reserve(1, 1)
    error = await rig.refusal(1, 1)
    assert error.reason is Reason.CONCURRENCY_EXCEEDED
    assert "tenant acme has 2 streams running and this request has 1; the limit is 2" in error.message
    await first.settle(1, 1)
    await rig.reserve(1, 1)
    rig = Rig({})
    for _ in range(3):
        await rig.reserve(1, 1)
    assert (await rig.refusal(1, 1)).metadata["scope"] == "tier standard"


async def test_request_holds_as_many_slots_as_it_has_streams() -> None:
    rig = Rig({"max_concurrent_streams": 5}, {"max_concurrent_streams": 4})
    assert rig.limiter.stream_limit(rig.identity, rig.tier) == (3, "max_concurrency of tier standard")
    first = await rig.reserve(1, 1, num_streams=2)
    with pytest.raises(MillraceError) as caught:
        await rig.reserve(1, 1, num_streams=2)
    assert caught.value.metadata == {"limit": "3", "used": "2", "requested": "2", "scope": "tier standard"}
    # What another one has taken for all takes nothing.
    await rig.reserve(1, 1, num_streams=0)
    second = await rig.reserve(1, 1)
    await second.settle(1, 1)
    await first.cancel()
    await rig.reserve(1, 1, num_streams=3)


async def test_monthly_tokens_cut_the_answer_where_they_end() -> None:
    rig = Rig({"monthly_tokens": 1000})
    reservation = await rig.reserve(100, 500)
    # All that it asked for is paid: nothing is left to watch.
    assert reservation.remaining_completion_budget() is None
    last = await rig.reserve(100, 500)
    assert last.remaining_completion_budget() == 300
    error = await rig.refusal(1, 1)
    assert (error.reason, error.retry_after_s) == (Reason.BUDGET_EXHAUSTED, None)
    await reservation.settle(100, 10)
    # What others gave back can be had, up to what was asked for.
    assert [await last.extend() for _ in range(3)] == [100, 100, 0]
    assert last.remaining_completion_budget() is None
    assert (await rig.reserve(90, 400)).remaining_completion_budget() == 200


async def test_month_begins_anew() -> None:
    rig = Rig({"monthly_tokens": 100})
    await rig.reserve(90, 10)
    await rig.refusal(1, 1)
    rig.now_s += 31 * 24 * 3600
    await rig.reserve(90, 10)


async def test_budget_in_money_counts_cached_tokens_at_their_price() -> None:
    # 1 unit a million prompt tokens, 4 a million completion tokens: 100 + 200 tokens cost 0.0009 units.
    rig = Rig({"monthly_budget": 0.0009})
    reservation = await rig.reserve(100, 1000)
    assert reservation.remaining_completion_budget() == 200
    await reservation.settle(100, 50, cached_prompt_tokens=100)
    # 100 x 0.5 + 50 x 4 = 250 of 900 are used; 650 - 50 prompt leave 150 tokens.
    assert (await rig.reserve(50, 1000)).remaining_completion_budget() == 150
    error = await rig.refusal(1, 1)
    assert error.reason is Reason.BUDGET_EXHAUSTED
    assert error.metadata["limit"] == "0.0009"


async def test_unbounded_answer_ends_with_its_budget() -> None:
    rig = Rig({"monthly_tokens": 250})
    reservation = await rig.reserve(10, None)
    assert reservation.remaining_completion_budget() == 100
    assert await reservation.extend() == 100
    assert await reservation.extend() == 40
    assert await reservation.extend() == 0
    assert reservation.remaining_completion_budget() == 240
    await reservation.settle(10, 240)
    assert await reservation.extend() == 0


async def test_settlement_survives_the_cancellation_of_its_caller() -> None:
    rig = Rig({"max_concurrent_streams": 1}, store=SlowStore)
    reservation = await rig.reserve(1, 1)
    settling = asyncio.create_task(reservation.settle(1, 1))
    await asyncio.sleep(0)
    settling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await settling
    await rig.limiter.close()
    await rig.reserve(1, 1)


async def test_requests_per_minute_headers_and_refusal() -> None:
    rig = Rig({"requests_per_minute": 10}, {"requests_per_minute": 2})
    headers = await rig.requests.admit("acme", "k")
    assert headers == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "1",
        "x-ratelimit-reset-requests": "1m0s",
    }
    await rig.requests.admit("acme", "k")
    with pytest.raises(MillraceError) as caught:
        await rig.requests.admit("acme", "k")
    assert caught.value.reason is Reason.REQUEST_RATE_EXCEEDED
    assert caught.value.metadata == {"limit": "2", "scope": "key k"}
    assert caught.value.retry_after_s is not None
    rig.now_s += caught.value.retry_after_s
    await rig.requests.admit("acme", "k")
    assert await rig.requests.admit("acme", "other key") != {}


async def test_running_stream_survives_the_loss_of_the_store() -> None:
    rig = Rig({"tokens_per_minute": 350})
    reservation = await rig.reserve(100, None)

    async def lost(*_: Any) -> Any:
        raise StoreLostError("gone")

    rig.store.acquire = rig.store.settle = lost  # type: ignore[method-assign]
    assert await reservation.extend() == CHUNK
    await reservation.settle(100, 150)
    assert (await rig.refusal(1, 1)).reason is Reason.LIMITS_UNAVAILABLE


async def test_sequences_that_are_computed_together_are_granted_as_much_each() -> None:
    rig = Rig({"tokens_per_minute": 1000, "monthly_tokens": 101})
    reservation = await rig.limiter.reserve(rig.identity, 20, 30, num_sequences=4)
    assert (reservation.tokens_per_sequence, reservation.is_short) == (20, True)
    assert [meter.charged for meter in reservation.charges.meters] == [100]
    assert reservation.charges.windows[0].amount == 20 + 4 * 30
    await reservation.settle(20, 77)
    assert list(rig.store._meters.values()) == [97]
