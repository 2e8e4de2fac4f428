"""A search over steps, through a whole gateway: what goes on from what, by whose judgement, at what price."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from millrace.engine.v1 import engine_pb2

from gateway.test_time.deliberations import strategy_of
from gateway.test_time.search import MAX_STEPS, StepSearch
from gateway.test_time.strategies import Concluded, Event, Rated, Sample, replay
from gateway.test_time.stream import DeliberateStream
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.pooling import PoolingEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode
from tests.unit.gateway.test_time.test_stream import (
    BODIES,
    CHAT,
    MESSAGES,
    PROMPT,
    RESPONSES,
    TIER,
    WITH_JUDGE,
    TwoModels,
    ask,
    in_ledger,
    said,
    settled,
    streams,
    with_deadline,
)

__all__ = ["streams"]
SEARCH = {"strategy": "search", "samples": 4}


def tree(steps: Mapping[str, tuple[str, ...]]) -> Callable[[engine_pb2.Submit, int], list[int]]:
    """Goes on from what was said: with one of the texts, by the sample's number."""

    def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
        before = bytes(submit.output_token_ids).decode()
        # A step that another engine has begun goes on as it would have there.
        known = max((each for each in steps if before.startswith(each)), key=len)
        texts = steps[known]
        return [*encode(known + texts[choice % len(texts)]), END_ID]

    return reply


# The judge of the rig prefers what is longer.
REST = "n" * 200
STEPS = {
    "": (f"a\n{REST}", f"bbb\n{REST}", f"cc\n{REST}", f"d\n{REST}"),
    "bbb\n": (f"x\n{REST}", "is 7", "no", "y"),
}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_the_best_steps_are_gone_on_from_and_the_best_answer_is_given(
    path: str, tmp_path: Path, streams: list[DeliberateStream]
) -> None:
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}}}
    engine = ScriptedEngine(reply=tree(STEPS), step_s=0.002)
    judge = PoolingEngine(model="judge", name="engine-1")
    tokenizer = TwoModels(tasks=["score"], num_dimensions=1)
    async with deployed(engine, judge, tokenizer=tokenizer, tables={**WITH_JUDGE, **ledger}) as stack:
        scorer = {"type": "model", "model": "judge"}
        text, usage = said(path, await ask(stack, path, **SEARCH, scorer=scorer))
        await settled(stack)
    told = usage["test_time"]
    assert text == "bbb\nis 7"
    assert told["ended_by"] == "decided"
    assert [bytes(each.output_token_ids).decode() for each in engine.submissions] == [""] * 4 + ["bbb\n"] * 4
    # Each draws for itself, from the same seed.
    assert [each.choice_index for each in engine.submissions] == list(range(8))
    assert len({each.sampling.seed for each in engine.submissions}) == 1
    assert {each["part"] for each in told["samples"]} == {"step"}
    assert [each["outcome"] for each in told["samples"]] == ["complete"] * 5 + ["chosen"] + ["complete"] * 2
    read = ["a\n", "bbb\n", "cc\n", "d\n", "bbb\nx\n", "bbb\nis 7", "bbb\nno", "bbb\ny"]
    assert [bytes(each).decode() for each in judge.read] == [f"hi{each}" for each in read]
    # A step is counted once, whatever goes on from it.
    steps = ("a\n", "bbb\n", "cc\n", "d\n", "x\n", "is 7", "no", "y")
    generated = sum(map(len, steps)) + 3
    assert told["completion_tokens"] == generated
    assert usage.get("completion_tokens", usage.get("output_tokens")) == generated
    (row,) = [row for row in in_ledger(tmp_path) if row[0] == "tiny"]
    given = len(encode("bbb\nis 7")) + 1
    assert row[1:] == (PROMPT, given, generated - given, "stop")
    # Steps end in the engine with their delimiter.
    assert len(engine.cancels) == 5
    (stream,) = streams
    assert stream.steps == replay(StepSearch(4, rates=True), stream.events)


async def test_without_a_scorer_the_likeliest_steps_are_kept_and_log_probabilities_are_whole(
    streams: list[DeliberateStream],
) -> None:
    def surety(choice: int, place: int) -> float:
        return 0.1 if choice in (2, 5) else 1.0

    steps = {"": ("a; no", "b; no", "c; no", "d; no"), "c;": ("e", "f", "g", "h")}
    async with deployed(ScriptedEngine(reply=tree(steps), surety=surety), tables=TIER) as stack:
        body = {**BODIES[CHAT], "logprobs": True, "test_time": {**SEARCH, "delimiter": ";"}}
        answer = (await stack.http.post(CHAT, json=body)).json()
    choice = answer["choices"][0]
    assert choice["message"]["content"] == "c;f"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["c", ";", "f", "<|end|>"]
    (stream,) = streams
    assert stream.steps == replay(strategy_of(stream._plan.ask, None), stream.events)


async def test_an_engine_that_dies_under_a_step_leaves_it_what_came_before() -> None:
    long = "it is the number 7, and no other"
    steps = {"": ("a\n",), "a\n": (long,)}
    dying = ScriptedEngine(reply=tree(steps), dies_after_tokens=60)
    async with deployed(dying, ScriptedEngine(name="engine-1", reply=tree(steps)), tables=TIER) as stack:
        text, usage = said(CHAT, await ask(stack, **SEARCH))
        await settled(stack)
        (heir,) = [engine for engine in stack.engines if engine.name == "engine-1"]
    assert text == f"a\n{long}"
    assert usage["test_time"]["ended_by"] == "decided"
    resumed = [bytes(each.output_token_ids).decode() for each in heir.submissions]
    assert any(each.startswith("a\nit") for each in resumed)


async def test_deadline_and_budget_give_what_has_come_furthest() -> None:
    def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
        return [*submit.output_token_ids, *encode("on\n"), *encode("x" * 100)]

    async with deployed(ScriptedEngine(reply=reply, step_s=0.005), tables=TIER) as stack:
        body = {**BODIES[CHAT], "max_tokens": 3000, "test_time": SEARCH}
        headers = {CONTEXT_HEADER: with_deadline(1.0)}
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body, headers=headers))
        await settled(stack)
        assert text.startswith("on\non\n")
        assert usage["test_time"]["ended_by"] == "deadline"
        text, usage = said(CHAT, await ask(stack, **SEARCH, budget_tokens=66))
        await settled(stack)
    told = usage["test_time"]
    assert told["ended_by"] == "budget"
    assert text.startswith("on\n")
    assert told["completion_tokens"] <= 66


async def test_a_budget_with_room_for_one_answer_gives_one(streams: list[DeliberateStream]) -> None:
    one_way = {"": (f"a\n{REST}",), "a\n": (f"b\n{REST}",), "a\nb\n": ("is 7",)}
    async with deployed(ScriptedEngine(reply=tree(one_way)), tables=TIER) as stack:
        text, usage = said(CHAT, await ask(stack, **SEARCH, budget_tokens=61))
        await settled(stack)
    told = usage["test_time"]
    assert (text, told["ended_by"]) == ("a\nb\nis 7", "budget")
    assert told["completion_tokens"] <= 61
    (stream,) = streams
    assert stream.steps == replay(strategy_of(stream._plan.ask, None), stream.events)


async def test_who_leaves_in_the_middle_frees_every_step() -> None:
    def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
        return [*submit.output_token_ids, *encode("on\n"), *encode("x" * 100)]

    engine = ScriptedEngine(reply=reply, step_s=0.01)
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "max_tokens": 3000, "test_time": SEARCH}
        asking = asyncio.create_task(stack.http.post(CHAT, json=body))
        async with asyncio.timeout(20):
            while len(engine.submissions) < 9:
                await asyncio.sleep(0.005)
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await asking
        await settled(stack)
        assert len(engine.cancels) == len(engine.submissions)
        assert (await stack.chat(max_tokens=1)).status_code == 200


@pytest.mark.parametrize(
    ("test_time", "field"),
    [
        ({**SEARCH, "delimiter": "x" * 17}, "test_time.delimiter"),
        ({"strategy": "best_of", "delimiter": ";"}, "test_time.delimiter"),
        ({**SEARCH, "confidence": 0.9}, "test_time.confidence"),
        ({**SEARCH, "scorer": {"type": "number"}}, "test_time.scorer.type"),
    ],
)
async def test_what_is_wrong_in_itself_is_refused_by_name(test_time: dict[str, Any], field: str) -> None:
    async with deployed(tables=TIER) as stack:
        refused = await stack.http.post(CHAT, json={**BODIES[CHAT], "test_time": test_time})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


# The strategy alone.


def step(index: int) -> Sample:
    return Sample(index=index, is_complete=False, is_step=True)


def answer(index: int) -> Sample:
    return Sample(index=index, is_complete=True)


def test_two_of_eight_are_kept_and_share_what_follows() -> None:
    events: list[Event] = [*map(step, range(8)), Rated(scores={index: index % 5 for index in range(8)})]
    steps = replay(StepSearch(8, rates=True), events)
    assert steps[8].rate == tuple(range(8))
    # Four has the highest score, and of those behind it three comes first.
    assert steps[9].parents == (3, 3, 3, 3, 4, 4, 4, 4)


def test_an_answer_stays_one_while_steps_go_on() -> None:
    first: list[Event] = [answer(0), *map(step, range(1, 8)), Rated(scores={0: 0.9, 1: 0.8, 2: 0.1})]
    steps = replay(StepSearch(8, rates=True), first)
    assert steps[-1].parents == (1,) * 8
    worse: list[Event] = [*map(answer, range(8, 16)), Rated(scores=dict.fromkeys(range(8, 16), 0.5))]
    assert replay(StepSearch(8, rates=True), [*first, *worse])[-1].winner == 0


def test_a_search_ends() -> None:
    strategy = StepSearch(2, rates=False)
    strategy.begin()
    for number in range(2 * MAX_STEPS):
        last = strategy.take(step(number))
    assert last.ended_by == "all_samples"
    assert last.winner is not None


def test_what_failed_is_not_gone_on_from() -> None:
    failed = Sample(index=0, is_complete=False, is_answer=False)
    assert replay(StepSearch(2, rates=True), [failed, step(1)])[-1].rate == (1,)
    cut = Sample(index=0, is_complete=False, mean_logprob=-0.5)
    events: list[Event] = [cut, Sample(index=1, is_complete=False, is_answer=False), Concluded(ended_by="x")]
    assert replay(StepSearch(2, rates=True), events)[2].winner == 0
