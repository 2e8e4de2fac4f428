"""Copies of requests are compared with what was answered, and are in nobody's way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.pipeline.shadow import Shadows
from tests.unit.gateway.models.test_served import TWO, answer, engine, says
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine


def shadowed(**options: Any) -> dict[str, Any]:
    shadow = {"model": "small", "share": 1.0, **options}
    return {"served": {**TWO, "shadows": {"big": shadow}}, "tenant": {"max_concurrent_streams": 2}}


async def outcomes(stack: Deployment) -> dict[str, float]:
    """How many copies have ended how, once all have."""
    # Requests are told of some milliseconds after they have ended.
    stack.gateway._edge.deferred.flush()
    shadows: Shadows = stack.gateway._shadows
    while shadows._running:
        await asyncio.wait(set(shadows._running))
    page = (await stack.http.get("/metrics")).text
    found = {}
    for line in page.splitlines():
        if line.startswith("millrace_shadow_requests_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('outcome="')[2].partition('"')[0]] = float(value)
    return {outcome: count for outcome, count in found.items() if count}


def pairs(page: str) -> dict[str, float]:
    """Pairs of answers by who was better."""
    found = {}
    for line in page.splitlines():
        if line.startswith("millrace_shadow_pairs_total{"):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('better="')[2].partition('"')[0]] = float(value)
    return {better: count for better, count in found.items() if count}


async def test_a_copy_is_compared_and_charged_to_nobody() -> None:
    big, small = engine("big"), engine("small")
    small.reply = says("I am bit")
    async with deployed(big, small, tables=shadowed()) as stack:
        assert await answer(stack, model="big", seed=3, temperature=0.5) == ("big", "I am big")
        assert await outcomes(stack) == {"different": 1.0}
        (copy,) = small.submissions
        (live,) = big.submissions
        assert list(copy.prompt_token_ids) == list(live.prompt_token_ids)
        assert (copy.sampling.seed, copy.sampling.temperature) == (3, 0.5)
        page = (await stack.http.get("/metrics")).text
        # Seven of eight characters.
        assert 'millrace_shadow_agreement_ratio_sum{model="big",shadow="small"} 0.875' in page
        # Neither of both is broken.
        assert pairs(page) == {"neither": 1.0}
        assert 'millrace_tokens_total{kind="completion",model="small"' not in page
        assert 'millrace_requests_total{face="http",model="small"' not in page
        # Nobody asks the shadow's own model in vain.
        assert await answer(stack, model="small") == ("small", "I am bit")


async def test_equal_answers_agree_and_schemas_are_judged() -> None:
    big, small = engine("big"), engine("small")
    small.reply = big.reply
    async with deployed(big, small, tables=shadowed()) as stack:
        await answer(stack, model="big", response_format={"type": "json_object"})
        assert await outcomes(stack) == {"same": 1.0}
        page = (await stack.http.get("/metrics")).text
        for side in ("live", "shadow"):
            labels = f'{{model="big",shadow="small",side="{side}",valid="true"}}'
            assert f"millrace_shadow_outputs_total{labels} 1.0" in page
        assert pairs(page) == {"neither": 1.0}


async def test_a_copy_that_breaks_its_constraint_is_a_pair_lost_and_one_that_mends_it_is_won() -> None:
    replies = {"cut": says("never at an end"), "whole": says("{}")}
    for live, shadow, better in (("cut", "whole", "shadow"), ("whole", "cut", "live")):
        big, small = engine("big"), engine("small")
        big.reply, small.reply = replies[live], replies[shadow]
        async with deployed(big, small, tables=shadowed()) as stack:
            await answer(stack, model="big", response_format={"type": "json_object"}, max_tokens=4)
            await outcomes(stack)
            assert pairs((await stack.http.get("/metrics")).text) == {better: 1.0}


async def test_a_share_of_requests_is_copied() -> None:
    async with deployed(engine("big"), engine("small"), tables=shadowed(share=0.0)) as stack:
        await answer(stack, model="big")
        assert await outcomes(stack) == {}


class Dying(ScriptedEngine):
    """Ends every gateway's stream with the first submission."""

    def _take(self, message: Any, outputs: Any, tasks: Any) -> None:
        if message.HasField("submit"):
            outputs.put_nowait(None)


@pytest.mark.parametrize(
    ("shadow", "options", "told"),
    [
        (Dying(name="dying", model="small"), {}, {"failed": 1.0}),
        (
            engine("small", refusal=MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "full")),
            {},
            {"failed": 1.0},
        ),
        (engine("small", max_model_len=4), {}, {"failed": 1.0}),
    ],
)
async def test_a_shadow_that_fails_changes_nothing(
    shadow: ScriptedEngine, options: dict[str, Any], told: dict[str, float]
) -> None:
    async with deployed(engine("big"), shadow, tables=shadowed(**options)) as stack:
        assert await answer(stack, model="big") == ("big", "I am big")
        assert await outcomes(stack) == told
        # An engine without room says nothing of its answers; any other failure is a pair lost.
        lost = {} if shadow.refusal is not None else {"live": 1.0}
        assert pairs((await stack.http.get("/metrics")).text) == lost
        assert await answer(stack, model="big") == ("big", "I am big")


async def test_copies_beyond_the_limit_are_dropped_and_one_that_hangs_is_ended() -> None:
    small = engine("small")
    small.gate.clear()
    async with deployed(engine("big"), small, tables=shadowed(max_concurrent=2, timeout_s=0.5)) as stack:
        for _ in range(5):
            assert await answer(stack, model="big") == ("big", "I am big")
            stack.gateway._edge.deferred.flush()
        assert await outcomes(stack) == {"dropped": 3.0, "late": 2.0}
        # What they held of the engine is free again.
        assert len(small.cancels) == 2
        # Nor do they count among the tenant's streams, of which it may have two.
        assert not stack.gateway.num_open
