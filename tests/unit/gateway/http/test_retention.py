"""`kv`: what an answer may forget reaches engines from every API, within the tier's bounds."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from millrace.common.v1 import chat_pb2, retention_pb2
from millrace.inference.v1 import inference_pb2

from contract.proto.engine import retention
from contract.retention import Retention
from gateway.settings import load_settings
from observability.emit.retention import KV_LOST
from runtime.context import CONTEXT_HEADER
from runtime.errors import ConfigError
from tests.unit.gateway.http.test_cache_salt import BODIES
from tests.unit.gateway.pipeline.test_slices import told, value
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

METADATA = ((CONTEXT_HEADER, signed_context()),)
MEASURES = {"tier": {"kv": {"max_lost": 1.0}}}
QUARTER: dict[str, Any] = {"policy": "window+sinks", "keep": 0.25}


def asked(stack: Deployment) -> list[Retention | None]:
    """What engines were asked, in order."""
    submitted = stack.engines[0].submissions
    return [retention(each.kv) if each.HasField("kv") else None for each in submitted]


@pytest.mark.parametrize("path", BODIES)
async def test_every_api_says_it(path: str) -> None:
    window = {"policy": "window+sinks", "window_tokens": 4096, "if_possible": True}
    async with deployed() as stack:
        for kv in (None, QUARTER, window, {"policy": "full"}):
            body = {"model": "tiny", **BODIES[path], **({} if kv is None else {"kv": kv})}
            served = await stack.http.post(path, json=body)
            assert served.status_code == 200, served.text
        assert asked(stack) == [
            None,
            Retention(policy="window+sinks", keep=0.25),
            Retention(policy="window+sinks", window_tokens=4096, if_possible=True),
            Retention(policy="full"),
        ]


@pytest.mark.parametrize("path", BODIES)
async def test_who_asks_for_a_bound_is_told_what_was_lost(path: str) -> None:
    engine = ScriptedEngine(lost_share=0.125)
    async with deployed(engine, tables=MEASURES) as stack:
        said = []
        for kv in (None, QUARTER, {**QUARTER, "max_lost": 0.5}):
            body = {"model": "tiny", **BODIES[path], **({} if kv is None else {"kv": kv})}
            said.append((await stack.http.post(path, json=body)).json()["usage"].get("kv"))
        assert said == [None, {"lost": 0.125}, {"lost": 0.125}]
        assert [each and each.max_lost for each in asked(stack)] == [None, 1.0, 0.5]
        await told(stack)
        labels = {"model": "tiny", "tier": "standard", "revision": ""}
        assert value(stack, KV_LOST, "_count", **labels) == 2
        assert value(stack, KV_LOST, "_sum", **labels) == 0.25


async def test_grpc_has_it_too() -> None:
    kv = retention_pb2.Retention(**QUARTER)
    said = chat_pb2.Conversation(messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content="hi")])
    async with deployed() as stack:
        chat = inference_pb2.ChatRequest(model="tiny", conversation=said, kv=kv)
        assert [each async for each in stack.inference.Chat(chat, metadata=METADATA)]
        generate = inference_pb2.GenerateRequest(model="tiny", text="hi", kv=kv)
        assert [each async for each in stack.inference.Generate(generate, metadata=METADATA)]
        assert asked(stack) == [Retention(**QUARTER)] * 2
        generate.kv.keep = 0.0
        with pytest.raises(grpc.aio.AioRpcError, match=r"kv\.keep.*above 0 and at most 1"):
            [each async for each in stack.inference.Generate(generate, metadata=METADATA)]


async def test_grpc_tells_it_too() -> None:
    kv = retention_pb2.Retention(**QUARTER, max_lost=0.5)
    async with deployed(ScriptedEngine(lost_share=0.125), tables=MEASURES) as stack:
        generate = inference_pb2.GenerateRequest(model="tiny", text="hi", kv=kv)
        *_, last = [each async for each in stack.inference.Generate(generate, metadata=METADATA)]
        assert last.usage.kv_lost == 0.125


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"policy": "window+sinks", "keep": 0}, "kv.keep", "above 0 and at most 1"),
    ({"policy": "window+sinks", "keep": 1.5}, "kv.keep", "above 0 and at most 1"),
    (
        {"policy": "kvzip", "keep": 0.5},
        "kv.policy",
        "not one of full, window+sinks, snapkv, h2o, kvzap",
    ),
    ({"policy": "window+sinks"}, "kv.keep", "exactly one of keep and window_tokens"),
    ({**QUARTER, "window_tokens": 9}, "kv.keep", "exactly one of keep and window_tokens"),
    ({"policy": "full", "keep": 0.5}, "kv.keep", "keeps everything; leave it out"),
    ({**QUARTER, "max_lost": 0}, "kv.max_lost", "above 0 and at most 1"),
    ({**QUARTER, "max_lost": 1.5}, "kv.max_lost", "above 0 and at most 1"),
    ({"policy": "full", "max_lost": 0.5}, "kv.max_lost", "keeps everything; leave it out"),
    ({"policy": "window+sinks", "window_tokens": 0}, "kv.window_tokens", "between 1 and"),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("kv", "field", "problem"), WRONG)
async def test_what_no_engine_can_follow_is_refused(
    path: str, kv: dict[str, Any], field: str, problem: str
) -> None:
    engine = ScriptedEngine()
    async with deployed(engine) as stack:
        refused = await stack.http.post(path, json={"model": "tiny", **BODIES[path], "kv": kv})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert field in error.get("param", error["message"])
        assert problem in error["message"]
        assert not engine.submissions


@pytest.mark.parametrize(
    ("tier", "kv", "field", "problem"),
    [
        ({"policies": ["full"]}, QUARTER, "kv.policy", "tier 'standard' does not have window+sinks"),
        ({"min_keep": 0.5}, QUARTER, "kv.keep", "less than the 0.5 that tier 'standard' keeps"),
        (
            {"min_window_tokens": 512},
            {"policy": "window+sinks", "window_tokens": 511},
            "kv.window_tokens",
            "less than the 512 that tier 'standard' keeps",
        ),
        (
            {},
            {**QUARTER, "max_lost": 0.2},
            "kv.max_lost",
            "tier 'standard' does not measure what answers lose; leave it out",
        ),
        (
            {"max_lost": 0.1},
            {**QUARTER, "max_lost": 0.2},
            "kv.max_lost",
            "more than the 0.1 that tier 'standard' lets answers lose",
        ),
    ],
)
async def test_a_tier_has_bounds(tier: dict[str, Any], kv: dict[str, Any], field: str, problem: str) -> None:
    async with deployed(tables={"tier": {"kv": tier}}) as stack:
        refused = await stack.chat(kv=kv)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert problem in refused.json()["error"]["message"]
        kept = {name: value for name, value in kv.items() if name != "max_lost"}
        assert (await stack.chat(kv=kept, service_tier="fast")).status_code == 200


async def test_a_tier_may_say_what_holds_for_those_who_ask_for_nothing() -> None:
    async with deployed(tables={"tier": {"kv": QUARTER}}) as stack:
        for more in ({}, {"kv": {"policy": "full"}}, {"service_tier": "fast"}):
            assert (await stack.chat(**more)).status_code == 200
        assert asked(stack) == [Retention(**QUARTER, if_possible=True), Retention(policy="full"), None]


async def test_a_tiers_bound_and_what_is_beyond_hold_for_who_forgets() -> None:
    own = {**QUARTER, "max_lost": 0.1, "beyond": "refuse"}
    async with deployed(tables={"tier": {"kv": own}}) as stack:
        for kv in (None, QUARTER, {**QUARTER, "max_lost": 0.05}, {"policy": "full"}):
            assert (await stack.chat(**({} if kv is None else {"kv": kv}))).status_code == 200
        found = [each and (each.max_lost, each.beyond) for each in asked(stack)]
        assert found == [(0.1, "refuse"), (0.1, "refuse"), (0.05, "refuse"), (None, "recompute")]


@pytest.mark.parametrize(
    ("kv", "problem"),
    [
        ({"policy": "window+sinks"}, "keep: policy window.* 0 are given: give keep, a part of the prompt's"),
        ({**QUARTER, "window_tokens": 9}, "keep: .*exactly one of keep and .* 2 are given: leave one out"),
        ({"policy": "window+sinks", "keep": 0.5, "policies": ["full"]}, "policy: 'window.*add it there"),
        ({"policies": []}, "policies: it is empty; name 'full' at least, or leave it out"),
        (
            {"policies": ["half"]},
            r"policies\[0\]: .*; expected one of full, h2o, kvzap, snapkv,",
        ),
        ({"keep": 0.5}, "keep: policy full keeps everything; leave it out, or ask for window"),
        ({"keep": 0.0, "policy": "window+sinks"}, "keep: 0.0 is not above 0 and at most 1: give the part to"),
        (
            {"window_tokens": 0, "policy": "snapkv"},
            "window_tokens: 0 is not between 1 and .*: give tokens",
        ),
        ({**QUARTER, "min_keep": 0.5}, "keep: .*less than tiers.standard.kv.min_keep = 0.5; raise it"),
        ({"min_keep": 2.0}, "min_keep: 2.0 is not above 0 and at most 1; set such a part"),
        ({"max_lost": 0.0}, "max_lost: 0.0 is not above 0 and at most 1; set such a part"),
        ({**QUARTER, "beyond": "ignore"}, "beyond: .*; expected one of recompute, refuse"),
    ],
)
def test_a_tier_that_cannot_be_meant_is_told(kv: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"^tiers\.standard\.kv\.{problem}"):
        load_settings({"tiers": {"standard": {"kv": kv}}})


async def test_engines_that_forget_nothing_are_left_out_where_it_is_asked_for() -> None:
    lacking = ScriptedEngine(name="a", unsupported=("retention",))
    async with deployed(lacking, ScriptedEngine(name="b")) as stack:
        for _ in range(3):
            assert (await stack.chat(kv=QUARTER)).status_code == 200
        assert not lacking.submissions
    async with deployed(ScriptedEngine(name="a", unsupported=("retention",))) as stack:
        refused = await stack.chat(kv=QUARTER)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "kv"
        assert (await stack.chat(kv={**QUARTER, "if_possible": True})).status_code == 200


WINDOW: dict[str, Any] = {"policy": "window+sinks", "window_tokens": 512}
# More than the engine's 4,096 positions.
LONG = 100_000


@pytest.mark.parametrize("path", BODIES)
async def test_who_forgets_asks_for_more_than_the_model_has_positions(path: str) -> None:
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    async with deployed() as stack:
        for kv in (WINDOW, QUARTER):
            body = {"model": "tiny", **BODIES[path], name: LONG, "kv": kv}
            served = await stack.http.post(path, json=body)
            assert served.status_code == 200, served.text
        assert [each.sampling.max_tokens for each in stack.engines[0].submissions] == [LONG, LONG]


@pytest.mark.parametrize(
    ("tables", "kv", "body", "told"),
    [
        ({}, None, {}, "4096 tokens"),
        ({}, {"policy": "snapkv", "keep": 0.5}, {}, "under window+sinks alone"),
        ({}, {**WINDOW, "if_possible": True}, {}, "without max_lost, if_possible and beams"),
        ({"tier": {"kv": {"max_lost": 0.5}}}, WINDOW, {}, "without max_lost"),
        ({"tier": {"kv": {**WINDOW}}}, None, {}, "if_possible"),
        ({}, WINDOW, {"beam_width": 2}, "beams"),
        ({"tier": {"max_context_tokens": 9000}}, WINDOW, {}, "9000 tokens"),
    ],
)
async def test_other_answers_end_with_the_positions(
    tables: dict[str, Any], kv: dict[str, Any] | None, body: dict[str, Any], told: str
) -> None:
    async with deployed(tables=tables) as stack:
        body = {"max_tokens": LONG, **body, **({} if kv is None else {"kv": kv})}
        refused = await stack.chat(**body)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        assert told in refused.json()["error"]["message"]
        assert not stack.engines[0].submissions


async def test_a_prompt_is_cut_to_the_positions_beside_a_stream() -> None:
    async with deployed() as stack:
        kv = {"kv": WINDOW, "max_tokens": LONG, "truncate_prompt_tokens": -1}
        said = {"role": "user", "content": "a" * 5000}
        turns = [said, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        assert (await stack.chat(messages=turns, **kv)).status_code == 200
        assert len(stack.engines[0].submissions[0].prompt_token_ids) < 4096
