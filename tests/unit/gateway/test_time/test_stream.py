"""Requests that think longer, through a whole gateway: what engines are asked for, what clients, limits and
the ledger are told, and what ends when.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from millrace.common.v1 import context_pb2
from millrace.engine.v1 import engine_pb2
from sqlalchemy import select

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import TIMEOUT_HEADER
from gateway.ledger.tables import REQUESTS, open_ledger
from gateway.test_time import deliberations
from gateway.test_time.deliberations import strategy_of
from gateway.test_time.strategies import replay
from gateway.test_time.stream import DeliberateStream
from runtime.context import CONTEXT_HEADER, sign, to_header
from tests.unit.gateway.rig.deployment import SECRET, Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.pooling import PoolingEngine, PoolingTokenizer
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, encode

TIER: dict[str, Any] = {"tier": {"test_time": {}}}
PROMPT = len(encode("2: hi\n"))
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI, "max_tokens": 60},
    MESSAGES: {"model": "tiny", "messages": HI, "max_tokens": 60},
    RESPONSES: {"model": "tiny", "input": "hi", "max_output_tokens": 60},
}


def saying(*texts: str) -> Callable[[engine_pb2.Submit, int], list[int]]:
    """Samples that say this, by their numbers."""
    return lambda submit, choice: [*encode(texts[choice % len(texts)]), END_ID]


def said(path: str, answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    """The answer's text, and what usage tells of its samples."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    match path:
        case "/v1/chat/completions":
            text = body["choices"][0]["message"]["content"]
        case "/v1/messages":
            text = body["content"][0]["text"]
        case _:
            text = body["output"][0]["content"][0]["text"]
    return text, body["usage"]


async def ask(stack: Deployment, path: str = CHAT, **test_time: Any) -> httpx.Response:
    return await stack.http.post(path, json={**BODIES[path], "test_time": test_time})


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[DeliberateStream]:
    """Those that are made."""
    made: list[DeliberateStream] = []

    class Kept(DeliberateStream):
        def __init__(self, *parts: Any, **options: Any) -> None:
            super().__init__(*parts, **options)
            made.append(self)

    monkeypatch.setattr(deliberations, "DeliberateStream", Kept)
    return made


def in_ledger(folder: Path) -> list[tuple[Any, ...]]:
    """(model, prompt, completion, candidate tokens, outcome) of every row."""
    names = ("model", "prompt_tokens", "completion_tokens", "candidate_tokens", "outcome")
    columns = [REQUESTS.c[name] for name in names]
    with open_ledger(f"sqlite:///{folder}/ledger.sqlite").connect() as connection:
        return [tuple(row) for row in connection.execute(select(*columns))]


async def settled(stack: Deployment) -> None:
    async with asyncio.timeout(20):
        while stack.gateway.num_open or any(engine.num_running for engine in stack.engines):
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_votes_end_when_they_are_decided_and_all_apis_tell_what_was_spent(path: str) -> None:
    engine = ScriptedEngine(reply=saying("it is 7", "so: 7"))
    async with deployed(engine, tables=TIER) as stack:
        text, usage = said(path, await ask(stack, path, strategy="self_consistency", samples=8))
        await settled(stack)
    told = usage["test_time"]
    assert text == "it is 7"
    assert [submit.choice_index for submit in engine.submissions] == [0, 1, 2, 3]
    assert (told["ended_by"], told["max_samples"], told["not_begun"]) == ("decided", 8, 4)
    assert told["votes"] == {"7": 4}
    assert [each["outcome"] for each in told["samples"]] == ["chosen", *["complete"] * 3]
    num_tokens = 2 * len(encode("it is 7")) + 2 * len(encode("so: 7")) + 4
    assert told["completion_tokens"] == num_tokens
    assert usage.get("completion_tokens", usage.get("output_tokens")) == num_tokens


async def test_samples_are_what_n_would_have_given_and_share_the_prompt_of_the_first() -> None:
    engine = ScriptedEngine(reply=saying("one 1", "two 2"))
    async with deployed(engine, tables=TIER) as stack:
        engine.gate.clear()
        asking = asyncio.create_task(
            stack.http.post(
                CHAT,
                json={**BODIES[CHAT], "cache_salt": "mine", "seed": 5, "test_time": {"strategy": "best_of"}},
            )
        )
        while not engine.num_running:
            await asyncio.sleep(0.005)
        # The others wait until the prompt is computed.
        assert len(engine.submissions) == 1
        engine.gate.set()
        answer = (await asking).json()
        await settled(stack)
    assert len(engine.submissions) == 8
    assert {submit.sampling.seed for submit in engine.submissions} == {5}
    assert [submit.choice_index for submit in engine.submissions] == list(range(8))
    assert len({submit.context.payload for submit in engine.submissions}) == 1, "with the salt that it has"
    assert len({tuple(submit.prompt_token_ids) for submit in engine.submissions}) == 1
    # It was prepared once, and its tokens are counted once.
    assert len(stack.tokenizer.prepared) == 1
    assert answer["usage"]["prompt_tokens"] == PROMPT


async def test_the_likeliest_sample_is_given() -> None:
    engine = ScriptedEngine(
        reply=saying("low", "high", "middling"), surety=lambda choice, place: (0.9, 0.1, 0.5)[choice]
    )
    async with deployed(engine, tables=TIER) as stack:
        text, usage = said(CHAT, await ask(stack, strategy="best_of", samples=3))
    assert text == "high"
    scores = [each["score"] for each in usage["test_time"]["samples"]]
    assert scores == [pytest.approx(-0.9), pytest.approx(-0.1), pytest.approx(-0.5)]
    assert usage["test_time"]["ended_by"] == "all_samples"


@pytest.mark.parametrize(
    ("scorer", "texts", "expected"),
    [
        ({"type": "number", "minimum": 5, "maximum": 9}, ["4", "none", "it is 7", "40"], "it is 7"),
        ({"type": "regex", "pattern": "^yes"}, ["no", "well, yes", "yes!", "oh yes"], "yes!"),
        ({"type": "regex", "pattern": "never"}, ["a", "b", "c", "d"], "a"),
    ],
)
async def test_a_check_chooses_the_first_that_passes(
    scorer: dict[str, Any], texts: list[str], expected: str
) -> None:
    engine = ScriptedEngine(reply=saying(*texts))
    async with deployed(engine, tables=TIER) as stack:
        text, usage = said(CHAT, await ask(stack, strategy="best_of", samples=4, scorer=scorer))
        await settled(stack)
    assert text == expected
    told = usage["test_time"]
    assert told["ended_by"] == ("all_samples" if expected == "a" else "decided")


class TwoModels(PoolingTokenizer):
    """A model that generates, and a judge that scores."""

    async def GetVocabulary(self, request: Any, context: Any) -> Any:
        kind = PoolingTokenizer if request.model == "judge" else ByteTokenizer
        return await kind.GetVocabulary(self, request, context)


WITH_JUDGE = {**TIER, "served": {"models": {"tiny": {"path": "t"}, "judge": {"path": "j"}}}}


async def test_a_served_model_scores_all_samples_in_one_request_with_a_row_of_its_own(tmp_path: Path) -> None:
    engine = ScriptedEngine(reply=saying("short", "the longest of all", "longer"))
    judge = PoolingEngine(model="judge", name="engine-1")
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}}}
    tables = {**WITH_JUDGE, **ledger}
    tokenizer = TwoModels(tasks=["score"], num_dimensions=1)
    async with deployed(engine, judge, tokenizer=tokenizer, tables=tables) as stack:
        scorer = {"type": "model", "model": "judge"}
        text, usage = said(CHAT, await ask(stack, strategy="best_of", samples=3, scorer=scorer))
        await settled(stack)
    assert text == "the longest of all"
    assert [submit.pooling.task for submit in judge.submissions] == ["score"]
    read = sum(len(encode("hi" + each)) for each in ("short", "the longest of all", "longer"))
    assert usage["test_time"]["scorer_tokens"] == read
    generated = sum(len(encode(each)) + 1 for each in ("short", "longer"))
    rows = sorted(in_ledger(tmp_path))
    assert [row[0] for row in rows] == ["judge", "tiny"]
    assert rows[0][1] == read
    assert rows[1][1:4] == (PROMPT, len(encode("the longest of all")) + 1, generated)


@pytest.mark.parametrize("on_failure", ["refuse", "answer"])
async def test_a_scorer_that_does_not_answer_is_told_as_the_request_says(on_failure: str) -> None:
    engine = ScriptedEngine(reply=saying("it"))
    async with deployed(engine, tables=TIER) as stack:
        scorer = {"type": "model", "model": "nobody"}
        answer = await ask(stack, strategy="best_of", samples=2, scorer=scorer, on_failure=on_failure)
        await settled(stack)
    if on_failure == "refuse":
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (404, "test_time.scorer")
        assert "'nobody'" in error["message"]
        assert "set on_failure to answer" in error["message"]
    else:
        text, usage = said(CHAT, answer)
        assert text == "it"
        assert usage["test_time"]["ended_by"] == "failure"
        assert "'nobody'" in usage["test_time"]["failure"]
        assert "on_failure" not in usage["test_time"]["failure"], "as it is set"


@pytest.mark.parametrize(
    ("scorer", "status", "problem"),
    [
        ({"type": "model", "model": "nobody"}, 404, "'nobody' is not served here"),
        ({"type": "verifier", "model": "nobody"}, 404, "'nobody' is not served here"),
        ({"type": "model", "model": "tiny"}, 400, "'tiny' cannot score"),
        ({"type": "verifier", "model": "judge"}, 400, "'judge' cannot generate"),
    ],
)
@pytest.mark.parametrize("strategy", ["best_of", "search"])
async def test_a_model_that_cannot_judge_is_told_before_a_sample_is_computed(
    strategy: str, scorer: dict[str, Any], status: int, problem: str
) -> None:
    # All of a limit's length, so that none would ever be scored.
    engine = ScriptedEngine(reply=saying("plain" * 20))
    judge = PoolingEngine(model="judge", name="engine-1")
    tokenizer = TwoModels(tasks=["score"], num_dimensions=1)
    asked = {"strategy": strategy, "samples": 4, "scorer": scorer}
    async with deployed(engine, judge, tokenizer=tokenizer, tables=WITH_JUDGE) as stack:
        refused = await ask(stack, **asked)
        assert not engine.submissions
        _, usage = said(CHAT, await ask(stack, **asked, on_failure="answer"))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, "test_time.scorer")
    assert problem in error["message"]
    assert problem in usage["test_time"]["failure"]
    assert len(engine.submissions) == 1


async def test_samples_stay_where_their_prompt_is_computed() -> None:
    engines = [ScriptedEngine(name=str(number), reply=saying("it")) for number in range(2)]
    messages = [{"role": "user", "content": "a prompt that is long enough " * 33}]
    body = {**BODIES[CHAT], "messages": messages, "test_time": {"strategy": "best_of", "samples": 8}}
    async with deployed(*engines, tables=TIER) as stack:
        said(CHAT, await stack.http.post(CHAT, json=body))
    assert sorted(len(engine.submissions) for engine in engines) == [0, 8]


async def test_traces_below_the_threshold_end_in_the_engine(streams: list[DeliberateStream]) -> None:
    text = "a text of more than forty tokens, so that there is a window"

    def surety(choice: int, place: int) -> float:
        return 0.1 if choice == 5 and place > 20 else 2.0 + choice / 100

    engine = ScriptedEngine(
        reply=saying(f"{text} 1", f"{text} 2", f"{text} 3", f"{text} 1"), surety=surety, step_s=0.002
    )
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "max_tokens": 100, "test_time": {"strategy": "deepconf", "samples": 8}}
        _, usage = said(CHAT, await stack.http.post(CHAT, json=body))
        await settled(stack)
    samples = usage["test_time"]["samples"]
    assert [index for index, each in enumerate(samples) if each["outcome"] == "stopped"] == [5]
    assert samples[5]["completion_tokens"] < len(encode(text))
    assert usage["test_time"]["stopped_early"] == 1
    assert len(engine.cancels) == 1
    # The engine says how sure it was; alternatives do not travel.
    assert {submit.confidence_top for submit in engine.submissions} == {20}
    assert {submit.sampling.logprobs for submit in engine.submissions} == {0}
    (stream,) = streams
    assert stream.steps == replay(strategy_of(stream._plan.ask, None), stream.events)


async def test_a_trace_that_falls_below_the_threshold_with_its_last_token_has_no_vote(
    streams: list[DeliberateStream],
) -> None:
    texts = [f"a text of more than forty tokens, so that there is a window {number}" for number in range(8)]

    def surety(choice: int, place: int) -> float:
        return 0.0 if choice == 6 and place == len(texts[0]) else 2.0 + choice / 100

    async with deployed(ScriptedEngine(reply=saying(*texts), surety=surety), tables=TIER) as stack:
        body = {**BODIES[CHAT], "max_tokens": 100, "test_time": {"strategy": "deepconf", "samples": 8}}
        _, usage = said(CHAT, await stack.http.post(CHAT, json=body))
    told = usage["test_time"]
    assert told["samples"][6]["outcome"] == "stopped"
    assert told["samples"][6]["completion_tokens"] == len(texts[0]) + 1
    assert sorted(told["votes"]) == ["0", "1", "2", "3", "4", "5", "7"]
    (stream,) = streams
    assert stream.steps == replay(strategy_of(stream._plan.ask, None), stream.events)
    assert sum(decision.end != () for decision in stream.steps) == 1


@pytest.mark.parametrize("strategy", ["best_of", "self_consistency", "deepconf"])
async def test_log_probabilities_are_those_that_were_asked_for(strategy: str) -> None:
    async with deployed(ScriptedEngine(reply=saying("7")), tables=TIER) as stack:
        test_time = {"strategy": strategy, "samples": 2}
        asked = {**BODIES[CHAT], "test_time": test_time}
        plain = (await stack.http.post(CHAT, json=asked)).json()["choices"][0]
        shown = (await stack.http.post(CHAT, json={**asked, "logprobs": True})).json()["choices"][0]
    assert plain["logprobs"] is None
    assert [each["token"] for each in shown["logprobs"]["content"]] == ["7", "<|end|>"]
    assert all(each["top_logprobs"] == [] for each in shown["logprobs"]["content"])


async def test_a_stream_says_that_it_goes_on_and_then_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.faces.accepted._KEEP_ALIVE_S", 0.02)
    long = "the answer is of more than sixteen tokens"
    engine = ScriptedEngine(reply=saying(long), step_s=0.005)
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "stream": True, "stream_options": {"include_usage": True}}
        body["test_time"] = {"strategy": "self_consistency", "samples": 2}
        response = await stack.http.post(CHAT, json=body)
        monkeypatch.undo()
        plain = await stack.events(CHAT, messages=HI, test_time=body["test_time"])
        for path, last in ((MESSAGES, "message_stop"), (RESPONSES, "response.completed")):
            streamed = {**BODIES[path], "stream": True, "test_time": body["test_time"]}
            assert last in (await stack.http.post(path, json=streamed)).text
    assert ": samples are under way\n\n" in response.text
    deltas = [each["choices"][0]["delta"].get("content", "") for each in plain]
    assert "".join(deltas) == long
    assert len([each for each in deltas if each]) > 1
    assert '"test_time":{"strategy":"self_consistency"' in response.text


async def test_limits_and_ledger_have_every_sample_and_the_prompt_once(tmp_path: Path) -> None:
    tables = {
        **TIER,
        "tenant": {"tokens_per_minute": 10_000},
        "gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}},
    }
    engine = ScriptedEngine(reply=saying("7"))
    async with deployed(engine, tables=tables) as stack:
        answer = await ask(stack, strategy="best_of", samples=4)
        # All that four may take is reserved, and their prompt once.
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 10_000 - PROMPT - 4 * 60
        await settled(stack)
        after = await stack.chat(max_tokens=1)
        left = int(after.headers["x-ratelimit-remaining-tokens"])
        assert left == 10_000 - (PROMPT + 4 * 2) - (PROMPT + 1)
    rows = [row for row in in_ledger(tmp_path) if row[3]]
    assert rows == [("tiny", PROMPT, 2, 3 * 2, "stop")]


async def test_who_leaves_in_the_middle_frees_everything_and_pays_for_what_was_computed(
    tmp_path: Path,
) -> None:
    tables = {
        **TIER,
        "tenant": {"max_concurrent_streams": 4, "tokens_per_minute": 10_000},
        "gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}},
    }
    engine = ScriptedEngine(reply=saying("a long text " * 4), step_s=0.01, steps_when_cancelled=1)
    async with deployed(engine, tables=tables) as stack:
        asking = asyncio.create_task(ask(stack, strategy="best_of", samples=4))
        async with asyncio.timeout(20):
            while engine.num_running < 4:
                await asyncio.sleep(0.005)
        refused = await stack.chat(max_tokens=1)
        assert refused.json()["error"]["reason"] == "CONCURRENCY_EXCEEDED", "four streams are under way"
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await asking
        await settled(stack)
        assert len(engine.cancels) == 4
        assert (await stack.chat(max_tokens=1)).status_code == 200
    (row,) = [row for row in in_ledger(tmp_path) if row[4] == "CANCELLED"]
    assert row[1:3] == (PROMPT, 0)
    assert 0 < row[3] < 4 * 49


async def test_a_deadline_gives_the_best_answer_so_far() -> None:
    def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
        return [*encode("done"), END_ID] if choice == 1 else encode("x" * 4000)

    engine = ScriptedEngine(reply=reply, step_s=0.02)
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "max_tokens": 3000, "test_time": {"strategy": "best_of", "samples": 3}}
        headers = {TIMEOUT_HEADER: "1000"}
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body, headers=headers))
        await settled(stack)
    assert text == "done"
    assert usage["test_time"]["ended_by"] == "deadline"
    assert usage["test_time"]["stopped_early"] == 2
    assert len(engine.cancels) == 2


def with_deadline(seconds: float) -> str:
    now_ms = time.time_ns() // 1_000_000
    context = context_pb2.RequestContext(
        request_id="request-1",
        tenant="acme",
        key_id="k1",
        tier="standard",
        issued_unix_ms=now_ms,
        deadline_unix_ms=now_ms + round(seconds * 1000),
    )
    return to_header(sign(context, SECRET.encode()))


async def test_a_budget_begins_no_sample_that_it_has_no_room_for() -> None:
    engine = ScriptedEngine(reply=saying("7 seven", "8 eight", "9 nine"))
    async with deployed(engine, tables=TIER) as stack:
        answer = await ask(stack, strategy="best_of", samples=8, budget_tokens=70)
        _, usage = said(CHAT, answer)
    told = usage["test_time"]
    # Each may take 60, and takes 7 or 8.
    assert told["ended_by"] == "budget"
    assert len(told["samples"]) == 2
    assert told["completion_tokens"] <= 70


async def test_without_max_tokens_samples_share_the_budget() -> None:
    engine = ScriptedEngine(reply=saying("7"))
    async with deployed(engine, tables=TIER) as stack:
        body = {"model": "tiny", "messages": HI}
        test_time = {"strategy": "best_of", "samples": 4, "budget_tokens": 100}
        await stack.http.post(CHAT, json={**body, "test_time": test_time})
    assert {submit.sampling.max_tokens for submit in engine.submissions} == {25}


FORBIDDEN: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"strategy": "best_of"}, "test_time", "has no test_time"),
    (
        {"test_time": {"strategies": ["best_of"]}},
        {"strategy": "deepconf"},
        "test_time.strategy",
        "use best_of",
    ),
    (
        {"test_time": {"max_samples": 4}},
        {"strategy": "best_of", "samples": 5},
        "test_time.samples",
        "the limit is 4 (tiers.standard.test_time.max_samples)",
    ),
    (
        {"test_time": {"max_budget_tokens": 100}},
        {"strategy": "best_of", "budget_tokens": 101},
        "test_time.budget_tokens",
        "the limit is 100",
    ),
    (
        {"test_time": {}},
        {"strategy": "best_of", "budget_tokens": 59},
        "test_time.budget_tokens",
        "less than one sample",
    ),
]


@pytest.mark.parametrize(("tier", "asked", "field", "problem"), FORBIDDEN)
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_what_the_tier_forbids_is_refused_by_name_or_answered_plainly(
    path: str, tier: dict[str, Any], asked: dict[str, Any], field: str, problem: str
) -> None:
    engine = ScriptedEngine(reply=saying("plain"))
    async with deployed(engine, tables={"tier": tier}) as stack:
        refused = await ask(stack, path, **asked)
        assert not engine.submissions
        text, usage = said(path, await ask(stack, path, **asked, on_failure="answer"))
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert field in message
    assert problem in message
    assert text == "plain"
    assert problem in usage["test_time"]["failure"]
    assert len(engine.submissions) == 1


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"test_time": {"strategy": "guess"}}, "test_time.strategy"),
        ({"test_time": {"strategy": "best_of", "samples": 1}}, "test_time.samples"),
        ({"test_time": {"strategy": "best_of", "samples": 1000}}, "test_time.samples"),
        ({"test_time": {"strategy": "best_of", "budget_tokens": 0}}, "test_time.budget_tokens"),
        ({"test_time": {"strategy": "best_of", "confidence": 0.9}}, "test_time.confidence"),
        ({"test_time": {"strategy": "deepconf", "confidence": 1}}, "test_time.confidence"),
        ({"test_time": {"strategy": "best_of", "on_failure": "cry"}}, "test_time.on_failure"),
        ({"test_time": {"strategy": "best_of", "other": 1}}, "test_time.other"),
        ({"test_time": {"strategy": "best_of", "scorer": {"type": "auto"}}}, "test_time.scorer.type"),
        (
            {"test_time": {"strategy": "deepconf", "scorer": {"type": "likelihood"}}},
            "test_time.scorer.type",
        ),
        ({"test_time": {"strategy": "best_of", "scorer": {"type": "regex"}}}, "test_time.scorer.pattern"),
        (
            {"test_time": {"strategy": "best_of", "scorer": {"type": "regex", "pattern": "("}}},
            "test_time.scorer.pattern",
        ),
        ({"test_time": {"strategy": "best_of", "scorer": {"type": "model"}}}, "test_time.scorer.model"),
        ({"test_time": {"strategy": "best_of", "scorer": {"type": "schema"}}}, "test_time.scorer.schema"),
        (
            {"test_time": {"strategy": "best_of", "scorer": {"type": "schema", "schema": 5}}},
            "test_time.scorer.schema",
        ),
        (
            {"test_time": {"strategy": "deepconf", "scorer": {"type": "number", "minimum": 5}}},
            "test_time.scorer.minimum",
        ),
        (
            {"test_time": {"strategy": "best_of", "scorer": {"type": "number", "minimum": 5, "maximum": 1}}},
            "test_time.scorer.maximum",
        ),
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"temperature": 0}, "temperature"),
    ],
)
async def test_what_is_wrong_in_itself_is_refused_by_name_whatever_on_failure_says(
    more: dict[str, Any], field: str
) -> None:
    async with deployed(tables=TIER) as stack:
        body = {**BODIES[CHAT], "test_time": {"strategy": "best_of"}, **more}
        body["test_time"] = {"on_failure": "answer", **body["test_time"]}
        refused = await stack.http.post(CHAT, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


async def test_completions_name_where_it_is_served() -> None:
    async with deployed(tables=TIER) as stack:
        body = {"model": "tiny", "prompt": "x", "test_time": {"strategy": "best_of"}}
        refused = await stack.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert "/v1/chat/completions" in refused.json()["error"]["message"]


async def test_more_samples_than_streams_are_refused_at_once() -> None:
    tables = {**TIER, "tenant": {"max_concurrent_streams": 3}}
    async with deployed(tables=tables) as stack:
        refused = await ask(stack, strategy="best_of", samples=4)
    assert refused.json()["error"]["param"] == "test_time.samples"
    assert refused.status_code == 400


async def test_an_engine_that_dies_under_samples_changes_nothing() -> None:
    dying = ScriptedEngine(reply=saying("it is 7"), dies_after_tokens=9)
    async with deployed(
        dying, ScriptedEngine(name="engine-1", reply=saying("it is 7")), tables=TIER
    ) as stack:
        text, usage = said(CHAT, await ask(stack, strategy="best_of", samples=3))
    assert text == "it is 7"
    assert [each["completion_tokens"] for each in usage["test_time"]["samples"]] == [8, 8, 8]


async def test_what_the_first_sample_is_refused_for_the_request_is() -> None:
    full = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too much waits", retry_after_s=7.0)
    async with deployed(ScriptedEngine(refusal=full), tables=TIER) as stack:
        refused = await ask(stack, strategy="self_consistency")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
        await settled(stack)


async def test_another_tenants_context_is_not_needed() -> None:
    async with deployed(ScriptedEngine(reply=saying("7")), tables=TIER) as stack:
        headers = {CONTEXT_HEADER: signed_context(tier="fast")}
        refused = await stack.http.post(
            CHAT, json={**BODIES[CHAT], "test_time": {"strategy": "best_of"}}, headers=headers
        )
    assert "tier 'fast' has no test_time" in refused.json()["error"]["message"]


@pytest.mark.parametrize("asked", ["fast", "priority"])
async def test_a_tier_that_forbids_it_is_named_by_both_of_its_names(asked: str) -> None:
    tables = {"fast": {"openai_name": "priority", "test_time": {"strategies": ["best_of"]}}}
    async with deployed(ScriptedEngine(), tables=tables) as stack:
        body = {**BODIES[CHAT], "service_tier": asked, "test_time": {"strategy": "search"}}
        refused = await stack.http.post(CHAT, json=body)
    assert "not among those of tier 'fast' ('priority')" in refused.json()["error"]["message"]
