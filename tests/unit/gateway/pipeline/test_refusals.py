"""Refusals of a tenant that repeats at once what is refused come later; those of others do not."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from millrace.inference.v1 import inference_pb2

from gateway.auth.authorizer import TENANT_HEADER
from gateway.pipeline import refusals as refusals_module
from gateway.pipeline.refusals import Refusals
from services.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context


class Time:
    """A clock that sleepers set forward."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def refusals(time: Time) -> Refusals:
    return Refusals(10, lambda: time.now_s, time.sleep)


async def test_a_tenant_that_repeats_at_once_is_held_to_its_rate(refusals: Refusals, time: Time) -> None:
    for _ in range(10):
        await refusals.turn("a")
    assert not time.slept
    for _ in range(50):
        await refusals.turn("a")
    # Sixty in all, ten of which may come at once.
    assert 4.8 <= time.now_s <= 5.0


async def test_one_that_comes_below_its_rate_never_waits(refusals: Refusals, time: Time) -> None:
    for _ in range(100):
        await refusals.turn("a")
        time.now_s += 0.11
    assert not time.slept


async def test_others_do_not_wait(refusals: Refusals, time: Time) -> None:
    for _ in range(30):
        await refusals.turn("a")
    num_slept = len(time.slept)
    assert num_slept
    await refusals.turn("b")
    assert len(time.slept) == num_slept


async def test_no_refusal_waits_longer_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    ends = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await ends.wait()

    monkeypatch.setattr(refusals_module, "_MAX_WAITING", 100)
    refusals = Refusals(10, lambda: 0.0, sleep)
    told = [asyncio.create_task(refusals.turn("a")) for _ in range(1000)]
    await asyncio.sleep(0)
    # Those that wait hold memory: so many, and the others are told at once.
    assert len(slept) == 100
    assert max(slept) <= 1.0
    assert sum(each.done() for each in told) == 900
    ends.set()
    await asyncio.gather(*told)


async def test_what_tenants_of_the_past_were_told_is_forgotten(refusals: Refusals, time: Time) -> None:
    for number in range(100):
        await refusals.turn(f"tenant-{number}")
        time.now_s += 1
    assert len(refusals._even_s) <= 2


async def test_both_faces_tell_a_refusal_in_its_tenants_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[str] = []

    async def turn(tenant: str) -> None:
        tenants.append(tenant)

    async with deployed() as stack:
        monkeypatch.setattr(stack.gateway._intake.refusals, "turn", turn)
        answer = await stack.chat(model="unknown")
        assert (answer.status_code, tenants) == (404, ["acme"])
        metadata = ((CONTEXT_HEADER, signed_context()), (TENANT_HEADER, "acme"))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stack.inference.Tokenize(inference_pb2.TokenizeRequest(model="unknown"), metadata=metadata)
        assert (refused.value.code(), tenants) == (grpc.StatusCode.NOT_FOUND, ["acme", "acme"])
        # Nobody is known, so nobody's turn is waited for.
        assert (await stack.http.get("/v1/models", headers={CONTEXT_HEADER: ""})).status_code == 401
        assert (await stack.chat()).status_code == 200
        assert len(tenants) == 2
