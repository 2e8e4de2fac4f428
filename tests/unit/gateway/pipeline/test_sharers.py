"""Which of its tenant's own requests an answer was held back by, and never whose else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.pipeline import sharers
from gateway.pipeline.delta import Meter, SharedTime
from gateway.pipeline.sharers import OwnRequest, OwnWork
from observability.emit.names import Cause
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine


def work(
    name: str, submitted_s: float, first_s: float | None = None, last_s: float = 0.0, engine: str = "e1"
) -> OwnRequest:
    meter = Meter(submitted_s, lambda _: None, submitted_s)
    meter.first_output_s, meter.last_output_s = first_s, last_s
    return OwnRequest(name, engine, meter)


def shared(own: OwnRequest, others: list[OwnRequest], **delays_s: float) -> tuple[SharedTime, ...]:
    books = OwnWork()
    for each in (*others, own):
        books.add("acme", each)
    return books.shared("acme", own, {Cause[name].value: value for name, value in delays_s.items()})


def test_long_prompts_are_to_blame_for_the_time_in_which_they_were_computed() -> None:
    own = work("own", 10.0, 11.0, 13.0)
    # The first one was over before, the second one overlaps by half a second, the third one by two.
    others = [work("a", 5.0, 9.0, 30.0), work("b", 10.5, 11.0, 30.0), work("c", 11.0, 13.0, 14.0)]
    found = shared(own, others, LONG_PREFILL=0.5)
    assert [(each.request_id, each.cause) for each in found] == [("c", "long_prefill"), ("b", "long_prefill")]
    assert [each.overlap_s for each in found] == pytest.approx([2.0, 0.5])


def test_places_are_to_blame_for_the_time_until_the_first_token() -> None:
    own = work("own", 10.0, 12.0, 20.0)
    others = [work("a", 1.0, 2.0, 11.0), work("b", 1.0, 13.0, 20.0), work("c", 1.0, 2.0, 11.5, engine="e2")]
    found = shared(own, others, BATCH_FULL=1.0, KV_PRESSURE=0.5)
    assert found == (SharedTime("a", "batch_full", pytest.approx(1.0)),)


def test_little_is_not_told_nor_are_many() -> None:
    own = work("own", 10.0, 12.0, 20.0)
    others = [work(str(number), 1.0, 2.0, 10.1 + number / 10) for number in range(9)]
    assert [each.request_id for each in shared(own, others, BATCH_FULL=1.0)] == ["8", "7", "6"]
    assert shared(own, others, BATCH_FULL=0.004) == ()
    assert shared(own, [work("a", 1.0, 2.0, 10.004)], BATCH_FULL=1.0) == ()
    assert shared(own, others, GRAMMAR_COMPILE=1.0) == ()


def test_a_request_that_still_waits_has_computed_until_now() -> None:
    now_s = time.monotonic()
    own = work("own", now_s - 2, now_s - 1, now_s)
    (found,) = shared(own, [work("waits", now_s - 3)], LONG_PREFILL=1.0)
    assert found.overlap_s == pytest.approx(2.0)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharers, "_MAX_TENANTS", 2)
    books = OwnWork()
    for tenant in ("a", "b", "c"):
        for number in range(200):
            books.add(tenant, work(str(number), 1.0, 2.0, 30.0))
    own, delays = work("own", 10.0, 12.0, 20.0), {Cause.BATCH_FULL.value: 1.0}
    assert books.shared("a", own, delays) == ()
    assert books.shared("c", own, delays) != ()
    assert {len(each) for each in books._tenants.values()} == {64}


async def _timings(rig: Deployment, name: str, tenant: str) -> dict[str, Any]:
    answer = await rig.http.post(
        "/v1/chat/completions",
        headers={CONTEXT_HEADER: signed_context(name, tenant=tenant)},
        json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "include_timing": True},
    )
    timings: dict[str, Any] = answer.json()["usage"]["timings"]
    return timings


async def test_answers_tell_of_their_own_tenants_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharers, "_MIN_S", 1e-9)
    engine = ScriptedEngine(delayed_by_s={Cause.LONG_PREFILL.value: 1.0})
    engine.gate.clear()
    async with deployed(engine) as rig:
        tenants = {"one": "acme", "others": "other", "two": "acme"}
        asked = [asyncio.create_task(_timings(rig, name, tenant)) for name, tenant in tenants.items()]
        # All three are at the engine, and wait there.
        while engine.num_running < 3:
            await asyncio.sleep(0.005)
        engine.gate.set()
        one, others, two = await asyncio.gather(*asked)
    for own, other in ((one, "two"), (two, "one")):
        (found,) = own["delayed_by_requests"]
        assert (found["request_id"], found["cause"]) == (other, "long_prefill")
        assert found["overlap_ms"] > 0
    assert others["delayed_by_requests"] == []
