"""The choice of an engine, and the prefix hashes that it shares with the engines."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from contract.engines import BlocksEvicted, BlocksStored
from contract.prefix import PrefixHasher, event_hash
from gateway.config import RoutingConfig
from gateway.engines.prefix import PrefixIndex, PromptHashes
from gateway.engines.router import RouteCandidate, RouteChoice, RouteReason, choose
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine, adapter

POLICY = RoutingConfig()
token_ids = st.lists(st.integers(0, 2**31), max_size=80)


@given(token_ids, st.binary(max_size=8), st.integers(1, 16))
def test_hashes_equal_the_engines(ids: list[int], salt: bytes, block_size: int) -> None:
    theirs = PrefixHasher(model="m", adapter="a", salt=salt, block_size=block_size)
    theirs.extend(ids, len(ids))
    ours = PromptHashes(ids, model="m", adapter="a", salt=salt, block_size=block_size)
    expected = [event_hash(block_hash) for block_hash in theirs.hashes]
    assert [ours.at(index) for index in range(len(expected))] == expected


@given(token_ids, st.integers(0, 80), st.integers(1, 8))
def test_index_finds_the_longest_prefix_that_is_held(ids: list[int], held: int, block_size: int) -> None:
    hashes = PromptHashes(ids, model="m", adapter="", salt=b"", block_size=block_size)
    index = PrefixIndex()
    blocks = tuple(hashes.at(i) for i in range(min(held, len(ids) // block_size)))
    index.apply([BlocksStored(blocks)])
    assert index.num_cached_blocks(hashes) == min(len(blocks), max(len(ids) - 1, 0) // block_size)
    index.apply([BlocksEvicted(blocks[1:2])])
    assert index.num_cached_blocks(hashes) <= 1 or len(blocks) < 2


def test_other_tenants_blocks_do_not_match() -> None:
    ids = list(range(64))
    mine = PromptHashes(ids, model="m", adapter="", salt=b"a", block_size=16)
    theirs = PromptHashes(ids, model="m", adapter="", salt=b"b", block_size=16)
    index = PrefixIndex()
    index.expect(mine)
    assert index.num_cached_blocks(mine) == 3
    assert index.num_cached_blocks(theirs) == 0


def test_least_pending_work_wins_and_ties_take_turns() -> None:
    busy, idle = RouteCandidate(pending_tokens=500, num_requests=1), RouteCandidate(0, 0, last_chosen=5)
    assert choose([busy, idle], 100, POLICY) == RouteChoice(1, RouteReason.LEAST_PENDING)
    assert choose([idle, RouteCandidate(0, 0, last_chosen=2)], 100, POLICY).index == 1


def test_a_held_prefix_outweighs_some_work_but_not_any() -> None:
    holder = RouteCandidate(pending_tokens=300, num_requests=1, cached_tokens=1000)
    idle = RouteCandidate(0, 0)
    assert choose([holder, idle], 1100, POLICY) == RouteChoice(0, RouteReason.PREFIX)
    overloaded = RouteCandidate(pending_tokens=5000, num_requests=9, cached_tokens=100_000)
    assert choose([overloaded, idle], 100_100, POLICY).index == 1


def test_an_engine_that_has_the_adapter_in_memory_outweighs_some_work() -> None:
    holder, idle = RouteCandidate(pending_tokens=300, num_requests=2), RouteCandidate(0, 0, is_cold=True)
    assert choose([holder, idle], 100, POLICY).index == 0
    assert choose([RouteCandidate(pending_tokens=3000, num_requests=9), idle], 100, POLICY).index == 1


def test_long_prompts_have_their_lane() -> None:
    policy = RoutingConfig(long_prompt_tokens=1000)
    lanes = [RouteCandidate(0, 0), RouteCandidate(0, 0), RouteCandidate(9000, 50, long_lane=True)]
    assert choose(lanes, 2000, policy) == RouteChoice(2, RouteReason.ONLY)
    assert choose(lanes, 10, policy).index in (0, 1)
    cached = [RouteCandidate(0, 0, cached_tokens=1500), *lanes[1:]]
    assert choose(cached, 2000, policy).index == 0
    assert choose(lanes[:2], 2000, policy).index in (0, 1)


async def test_requests_with_a_shared_prefix_meet_on_one_engine() -> None:
    engines = [ScriptedEngine(name=str(number)) for number in range(3)]
    shared = "a prefix that is shared by many " * 20
    async with deployed(*engines) as stack:
        for number in range(6):
            message = {"role": "user", "content": f"{shared}{number}"}
            assert (await stack.chat(messages=[message])).status_code == 200
        assert sorted(len(engine.submissions) for engine in engines) == [0, 0, 6]
        exposed = (await stack.http.get("/metrics")).text
        assert 'reason="prefix"' in exposed


async def test_requests_that_share_a_prefix_do_not_repel_each_other_by_the_work_that_it_saves() -> None:
    engines = [ScriptedEngine(name=str(number)) for number in range(2)]
    message = {"role": "user", "content": "a prefix that is shared by many " * 30}
    async with deployed(*engines) as stack:
        await stack.chat(messages=[message])
        await asyncio.gather(*(stack.chat(messages=[message]) for _ in range(7)))
    assert sorted(len(engine.submissions) for engine in engines) == [0, 8]


async def test_tier_with_a_pool_is_kept_to_its_engines() -> None:
    engines = [ScriptedEngine(name="a", pool="big"), ScriptedEngine(name="b", pool="small")]
    async with deployed(*engines, tables={"fast": {"pool": "small"}}) as stack:
        for _ in range(4):
            assert (await stack.chat(service_tier="fast")).status_code == 200
        assert [len(engine.submissions) for engine in engines] == [0, 4]
        # A tier without one takes every engine.
        while not engines[0].submissions:
            assert (await stack.chat()).status_code == 200
        # Latency is told by the pool that served, whether the tier asks for one or not.
        exposed = (await stack.http.get("/metrics")).text.splitlines()
        firsts = [line for line in exposed if line.startswith("millrace_time_to_first_token_seconds_count")]
        assert any('tier="fast"' in line and 'pool="small"' in line for line in firsts)
        assert any('tier="fast"' not in line and 'pool="big"' in line for line in firsts)
        assert not any('pool=""' in line for line in firsts)


async def test_pool_without_engines_is_named() -> None:
    async with deployed(tables={"fast": {"pool": "gpu"}}) as stack:
        refused = await stack.chat(service_tier="fast")
        assert refused.status_code == 503
        assert "in pool 'gpu'" in refused.json()["error"]["message"]


async def test_what_one_make_lacks_goes_to_another_or_is_refused_by_name() -> None:
    ranked = {"model": "tiny", "prompt": "x", "best_of": 2, "n": 1}
    lacking = ScriptedEngine(name="a", unsupported=("beam_width", "best_of"))
    other = ScriptedEngine(name="b")
    async with deployed(lacking, other) as stack:
        for _ in range(4):
            assert (await stack.http.post("/v1/completions", json=ranked)).status_code == 200
        assert [len(engine.submissions) for engine in (lacking, other)] == [0, 4]
    async with deployed(ScriptedEngine(name="a", unsupported=("beam_width", "best_of"))) as stack:
        refused = await stack.http.post("/v1/completions", json=ranked)
        assert (refused.status_code, refused.json()["error"]["reason"]) == (400, "UNSUPPORTED_FIELD")
        assert "best_of" in refused.json()["error"]["message"]
        assert (await stack.chat()).status_code == 200


async def test_long_prompts_go_to_the_pool_that_is_their_lane() -> None:
    engines = [ScriptedEngine(name="a"), ScriptedEngine(name="b", pool="long")]
    routing = {"long_prompt_tokens": 500, "long_lane": ["long"], "policy": "least_pending"}
    async with deployed(*engines, tables={"gateway": {"routing": routing}}) as stack:
        for _ in range(3):
            await stack.chat(messages=[{"role": "user", "content": "x" * 1000}])
            await stack.chat()
        assert [len(engine.submissions) for engine in engines] == [3, 3]
        assert all(len(submit.prompt_token_ids) > 500 for submit in engines[1].submissions)


async def test_changes_of_an_engine_s_adapters_reach_the_choice() -> None:
    engines = [ScriptedEngine(name="a", adapters=("poet",)), ScriptedEngine(name="b", adapters=("poet",))]
    async with deployed(*engines) as stack:
        engines[1].loaded = ("poet",)
        engines[1].names["late"] = adapter("late", "/late")
        await engines[1].tell_adapters()
        listed: list[str] = []
        while "tiny:late" not in listed:
            listed = [model["id"] for model in (await stack.http.get("/v1/models")).json()["data"]]
        for engine in engines:
            engine.submissions.clear()
        for _ in range(3):
            await stack.chat(model="tiny:poet")
        # The one that has it, wherever its name leads.
        assert [len(engine.submissions) for engine in engines] == [0, 3]


async def test_adapter_is_asked_for_as_a_model_and_sent_where_it_is_served() -> None:
    engines = [ScriptedEngine(name="a", adapters=("poet",)), ScriptedEngine(name="b")]
    async with deployed(*engines) as stack:
        listed = (await stack.http.get("/v1/models")).json()
        assert [model["id"] for model in listed["data"]] == ["tiny", "default", "tiny:poet"]
        for _ in range(3):
            assert (await stack.chat(model="tiny:poet")).json()["model"] == "tiny:poet"
        assert [len(engine.submissions) for engine in engines] == [3, 0]
        assert {submit.adapter for submit in engines[0].submissions} == {"poet"}
        # The tokenizer service knows the model that is adapted.
        assert {request.model for request in stack.tokenizer.prepared} == {"tiny"}
        refused = await stack.chat(model="painter")
        assert (refused.status_code, refused.json()["error"]["reason"]) == (404, "MODEL_NOT_FOUND")
        assert "tiny:poet" in refused.json()["error"]["message"]
