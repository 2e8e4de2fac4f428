"""Metrics by which a slow slice is found and promises are watched: what a request is counted under."""

from __future__ import annotations

import asyncio
import json

import pytest

from observability.emit import names
from observability.emit.names import Metric
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode

SLICE = {
    "tenant": "acme",
    "tier": "standard",
    "model": "tiny",
    "revision": "r7",
    "prompt_bucket": "<=128",
    "cache": "hit",
    "guided": "false",
    "speculative": "false",
    "adapter": "",
    "pool": "long",
}


def value(stack: Deployment, metric: Metric, suffix: str = "", **labels: str) -> float:
    return stack.metrics.registry.get_sample_value(f"{metric.name}{suffix}", labels) or 0.0


def tables(tpot_target_ms: int = 60_000) -> dict[str, object]:
    tier = {"ttft_target_ms": 60_000, "tpot_target_ms": tpot_target_ms}
    return {"tier": tier}


async def told(stack: Deployment) -> None:
    """Until what follows a request is done."""
    stack.gateway._edge.deferred.flush()
    await asyncio.sleep(0)


async def test_times_to_tokens_have_all_slices() -> None:
    reply = [*encode("hello"), END_ID]
    engine = ScriptedEngine(pool="long", revision="r7", reply=lambda submit, choice: reply)
    async with deployed(engine, tables={**tables(), "model": {"revision": "r7"}}) as stack:
        assert (await stack.chat()).status_code == 200
        await told(stack)
        assert value(stack, names.TTFT, "_count", **SLICE) == 1
        assert value(stack, names.TPOT, "_count", **SLICE, output_bucket="<=128") == 1


@pytest.mark.parametrize(("target_ms", "met"), [(60_000, "true"), (1, "false")])
async def test_goodput_counts_requests_that_met_both_targets(target_ms: int, met: str) -> None:
    # A token takes 20 ms at least.
    async with deployed(ScriptedEngine(step_s=0.02), tables=tables(target_ms)) as stack:
        assert (await stack.chat()).status_code == 200
        await told(stack)
        other = {"true": "false", "false": "true"}[met]
        assert value(stack, names.GOODPUT, tier="standard", model="tiny", met=met) == 1
        assert value(stack, names.GOODPUT, tier="standard", model="tiny", met=other) == 0
        # The first token came in time either way.
        of = {"tier": "standard", "tenant": "acme", "objective": "ttft"}
        assert value(stack, names.SLO, **of, met="true") == 1


@pytest.mark.parametrize(
    ("call", "valid"),
    [
        ({"name": "add", "arguments": {"a": 1}}, "true"),
        ({"name": "subtract", "arguments": {"a": 1}}, "false"),
        ({"name": "add", "arguments": [1]}, "false"),
    ],
)
async def test_tool_calls_are_counted_by_validity(call: dict[str, object], valid: str) -> None:
    text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    engine = ScriptedEngine(reply=lambda submit, choice: [*encode(text), END_ID])
    async with deployed(engine) as stack:
        tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
        assert (await stack.chat(tools=tools)).status_code == 200
        await told(stack)
        counted = {
            each: value(stack, names.TOOL_CALLS, model="tiny", valid=each) for each in ("true", "false")
        }
    assert counted == {"true": 0.0, "false": 0.0} | {valid: 1.0}


async def test_what_alerts_rate_is_there_before_it_happens() -> None:
    """What a gateway knows before anybody asks, and the rest with the first request of a slice."""
    async with deployed(ScriptedEngine(), tables=tables()) as stack:

        def counted(metric: Metric, **labels: str) -> set[str]:
            ((label, _),) = metric.values.items()
            found = (
                sample
                for family in stack.metrics.registry.collect()
                for sample in family.samples
                if sample.name == metric.name
            )
            return {each.labels[label] for each in found if labels.items() <= each.labels.items()}

        both = {"true", "false"}
        assert counted(names.GOODPUT, tier="standard", model="tiny") == both
        assert counted(names.TOOL_CALLS, model="tiny") == both
        assert counted(names.RESUBMISSIONS) == {"continued", "failed"}
        assert counted(names.REQUESTS) == counted(names.SLO) == set()
        assert (await stack.chat()).status_code == 200
        await told(stack)
        assert counted(names.REQUESTS, tenant="acme") == {"ok", "cancelled", "refused", "failed"}
        assert counted(names.SLO, tenant="acme", objective="ttft") == both
