"""Refusals of a tenant that repeats at once what is refused come later; those of others do not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import pytest
from envoy_api.service.ratelimit.v3 import rls_pb2
from millrace.inference.v1 import inference_pb2

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import TENANT_HEADER
from gateway.faces.error_forms import ERROR_FORMS
from gateway.intake import refusals as refusals_module
from gateway.intake.refusals import Refusals
from gateway.limits.servicer import TENANT_ENTRY, RateLimitServicer
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context
from tests.unit.large_pieces import nothing_large_is_kept

LARGE_CLIENT = """
import json, sys, urllib.error, urllib.request
url, name, value = sys.argv[1:]
body = {"model": "unknown", "messages": [{"role": "user", "content": "a" * 8_000_000}]}
headers = {name: value, "content-type": "application/json"}
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
except urllib.error.HTTPError as error:
    print(error.code, end="")
"""


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
        await refusals.throttle("a")
    assert not time.slept
    for _ in range(50):
        await refusals.throttle("a")
    # Sixty in all, ten of which may come at once.
    assert 4.8 <= time.now_s <= 5.0


async def test_one_that_comes_below_its_rate_never_waits(refusals: Refusals, time: Time) -> None:
    for _ in range(100):
        await refusals.throttle("a")
        time.now_s += 0.11
    assert not time.slept


async def test_others_do_not_wait(refusals: Refusals, time: Time) -> None:
    for _ in range(30):
        await refusals.throttle("a")
    num_slept = len(time.slept)
    assert num_slept
    await refusals.throttle("b")
    assert len(time.slept) == num_slept


async def test_no_refusal_waits_longer_than_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    ends = asyncio.Event()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await ends.wait()

    monkeypatch.setattr(refusals_module, "_MAX_WAITING", 100)
    refusals = Refusals(10, lambda: 0.0, sleep)
    told = [asyncio.create_task(refusals.throttle("a")) for _ in range(1000)]
    await asyncio.sleep(0)
    # Those that wait hold memory: so many of a tenant, and the others are told at once.
    assert len(slept) == 100
    assert max(slept) <= 1.0
    assert sum(each.done() for each in told) == 900
    # Another tenant's flood is held up all the same.
    others = [asyncio.create_task(refusals.throttle("b")) for _ in range(50)]
    await asyncio.sleep(0)
    assert not all(each.done() for each in others)
    ends.set()
    await asyncio.gather(*told, *others)
    assert not refusals._num_waiting


async def test_what_tenants_of_the_past_were_told_is_forgotten(refusals: Refusals, time: Time) -> None:
    for number in range(100):
        await refusals.throttle(f"tenant-{number}")
        time.now_s += 1
    assert len(refusals._even_s) <= 2


async def test_both_faces_tell_a_refusal_in_its_tenants_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants: list[str] = []

    async def turn(tenant: str) -> None:
        tenants.append(tenant)

    async with deployed() as stack:
        monkeypatch.setattr(stack.gateway._intake.refusals, "throttle", turn)
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


async def test_a_refusal_that_waits_holds_nothing_large(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, goes_on = asyncio.Event(), asyncio.Event()

    async def turn(tenant: str) -> None:
        waits.set()
        await goes_on.wait()

    async with deployed() as stack:
        monkeypatch.setattr(stack.gateway._intake.refusals, "throttle", turn)
        url = f"http://127.0.0.1:{stack.gateway.http.port}/v1/chat/completions"
        # The client is a process of its own, so that what is held is the gateway's.
        client = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LARGE_CLIENT, url, CONTEXT_HEADER, signed_context(), stdout=subprocess.PIPE
        )
        async with nothing_large_is_kept():
            await waits.wait()
        goes_on.set()
        output, _ = await client.communicate()
        assert output == b"404"


async def test_paths_that_are_not_served_wait_and_failures_of_this_side_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []

    async def turn(tenant: str) -> None:
        told.append(tenant)

    async with deployed() as stack:
        monkeypatch.setattr(stack.gateway._intake.refusals, "throttle", turn)
        assert (await stack.http.post("/v1/moderations", json={})).status_code == 404
        assert (await stack.http.get("/v1/chat/completions")).status_code == 405
        assert told == ["acme", "acme"]
        stack.gateway._pipeline.draining = True
        assert (await stack.chat()).status_code == 503
        assert len(told) == 2


async def test_envoy_hears_of_a_call_over_the_limit_in_its_tenants_turn() -> None:
    told: list[str] = []

    async def turn(tenant: str) -> None:
        told.append(tenant)

    class Counter:
        async def count(self, tenant: str, key_id: str) -> dict[str, str]:
            metadata = {"limit": "1", "scope": f"tenant {tenant}"}
            raise MillraceError(
                Reason.REQUEST_RATE_EXCEEDED, "too many", metadata=metadata, retry_after_s=1.0
            )

    counter: Any = Counter()
    request = rls_pb2.RateLimitRequest()
    request.descriptors.add().entries.add(key=TENANT_ENTRY, value="acme")
    answer = await RateLimitServicer(counter, turn, ERROR_FORMS).ShouldRateLimit(request, None)  # type: ignore[arg-type]
    assert (answer.overall_code, told) == (rls_pb2.RateLimitResponse.OVER_LIMIT, ["acme"])
