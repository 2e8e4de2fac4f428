"""Parts that follow each other, through a whole gateway: a larger model where the first one is doubted, and
drafts with critiques between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from millrace.engine.v1 import engine_pb2

from contract.errors import MillraceError, Reason
from gateway.test_time.chains import CritiqueRevise, Escalate, settled_by
from gateway.test_time.strategies import Concluded, Event, Grown, Rated, Sample, replay
from gateway.test_time.stream import DeliberateStream
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode
from tests.unit.gateway.test_time.test_stream import (
    BODIES,
    CHAT,
    MESSAGES,
    PROMPT,
    RESPONSES,
    TIER,
    ask,
    in_ledger,
    said,
    saying,
    settled,
    streams,
    with_deadline,
)

__all__ = ["streams"]
LONG = "xyz and many more tokens than there are in one window"
TWO: dict[str, Any] = {**TIER, "served": {"models": {"tiny": {"path": "t"}, "big": {"path": "b"}}}}
UP = {"strategy": "escalate", "model": "big"}


def prompt_tokens(usage: dict[str, Any]) -> int:
    """Anthropic counts cached ones apart."""
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"]) + int(usage.get("cache_read_input_tokens", 0))


def streamed_text(path: str, body: str) -> list[str]:
    """What the deltas of a stream say."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: {")]
    events = [msgspec.json.decode(line) for line in lines]
    match path:
        case "/v1/chat/completions":
            return [each["choices"][0]["delta"].get("content", "") for each in events if each["choices"]]
        case "/v1/messages":
            deltas = [each["delta"] for each in events if each["type"] == "content_block_delta"]
            return [each["text"] for each in deltas]
        case _:
            return [each["delta"] for each in events if each["type"] == "response.output_text.delta"]


def pair(first: str, larger: str, *, doubt: float = 1.0, **options: Any) -> list[ScriptedEngine]:
    """A first engine that is sure until its tenth token and then gives `doubt`, and a larger one."""

    def surety(choice: int, place: int) -> float:
        return 0.01 if place < 10 else doubt

    return [
        ScriptedEngine(reply=saying(first), surety=surety, **options),
        ScriptedEngine(name="engine-1", model="big", reply=saying(larger)),
    ]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_draft_that_is_doubted_ends_at_once_and_the_larger_model_answers(path: str) -> None:
    first, larger = pair(LONG, "it is 7", step_s=0.002)
    async with deployed(first, larger, tables=TWO) as stack:
        text, usage = said(path, await ask(stack, path, **UP))
        await settled(stack)
    told = usage["test_time"]
    assert text == "it is 7"
    draft, answer = told["samples"]
    assert (draft["outcome"], answer["outcome"], answer["part"]) == ("stopped", "chosen", "answer")
    assert (draft["model"], answer["model"]) == (None, "big")
    # Ten sure tokens hide doubts in a window of sixteen for so long, and no longer.
    assert 16 <= draft["completion_tokens"] < len(LONG)
    assert len(first.cancels) == 1
    spent = {each["model"]: each for each in told["models"]}
    assert spent["tiny"]["completion_tokens"] == draft["completion_tokens"]
    assert spent["big"]["completion_tokens"] == len(encode("it is 7")) + 1
    total = sum(each["completion_tokens"] for each in told["models"])
    assert told["completion_tokens"] == usage.get("completion_tokens", usage.get("output_tokens")) == total
    assert prompt_tokens(usage) == 2 * PROMPT


async def test_a_draft_that_is_believed_is_the_answer_and_the_larger_model_hears_nothing() -> None:
    first, larger = pair(LONG, "it is 7", doubt=0.02)
    async with deployed(first, larger, tables=TWO) as stack:
        text, usage = said(CHAT, await ask(stack, **UP))
    told = usage["test_time"]
    assert (text, told["ended_by"], told["not_begun"]) == (LONG, "decided", 1)
    assert not larger.submissions
    assert [each["model"] for each in told["models"]] == ["tiny"]
    assert usage["prompt_tokens"] == PROMPT


@pytest.mark.parametrize(("draft", "expected"), [("it is 7", "it is 7"), ("no idea", "larger")])
async def test_a_check_may_judge_the_draft(draft: str, expected: str) -> None:
    async with deployed(*pair(draft, "larger"), tables=TWO) as stack:
        text, _ = said(CHAT, await ask(stack, **UP, scorer={"type": "number"}))
    assert text == expected


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_nothing_of_a_doubted_draft_is_streamed(path: str) -> None:
    larger = "it is certainly the number 7"
    async with deployed(*pair(LONG, larger), tables=TWO) as stack:
        body = {**BODIES[path], "stream": True, "test_time": UP}
        response = await stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    streamed = streamed_text(path, response.text)
    assert "".join(streamed) == larger
    assert LONG[:3] not in response.text


async def test_tools_thoughts_and_log_probabilities_of_the_larger_model_are_passed_on() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    first, larger = pair(LONG, call)
    async with deployed(first, larger, tables=TWO) as stack:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body = {**BODIES[CHAT], "max_tokens": 100, "tools": tools, "logprobs": True, "test_time": UP}
        choice = (await stack.http.post(CHAT, json=body)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f"
    assert choice["logprobs"]["content"]


async def test_each_model_has_its_row_and_limits_get_both(tmp_path: Path) -> None:
    tables = {
        **TWO,
        "tenant": {"tokens_per_minute": 10_000},
        "gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}},
    }
    first, larger = pair("one", "it is 7", doubt=0.01)
    async with deployed(first, larger, tables=tables) as stack:
        _, usage = said(CHAT, await ask(stack, **UP, scorer={"type": "number"}))
        await settled(stack)
        after = await stack.chat(max_tokens=1)
        left = int(after.headers["x-ratelimit-remaining-tokens"])
    assert left == 10_000 - (PROMPT + 4) - (PROMPT + 8) - (PROMPT + 1)
    rows = sorted(row for row in in_ledger(tmp_path) if row[2] != 1)
    assert rows == [("big", PROMPT, 8, 0, "stop"), ("tiny", PROMPT, 0, 4, "stop")]
    assert usage["total_tokens"] == 2 * PROMPT + 4 + 8


async def test_a_deadline_while_the_larger_model_writes_gives_the_draft() -> None:
    first, larger = pair("no idea", "x" * 2000)
    larger.step_s = 0.02
    async with deployed(first, larger, tables=TWO) as stack:
        test_time = {**UP, "scorer": {"type": "number"}}
        body = {**BODIES[CHAT], "max_tokens": 3000, "test_time": test_time}
        headers = {CONTEXT_HEADER: with_deadline(1.0)}
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body, headers=headers))
        await settled(stack)
    assert (text, usage["test_time"]["ended_by"]) == ("no idea", "deadline")
    assert [each["outcome"] for each in usage["test_time"]["samples"]] == ["chosen", "stopped"]
    assert len(larger.cancels) == 1


async def test_a_budget_with_no_room_for_the_larger_model_gives_the_draft() -> None:
    first, larger = pair("no idea", "it is 7")
    async with deployed(first, larger, tables=TWO) as stack:
        asked = {**UP, "scorer": {"type": "number"}, "budget_tokens": 60}
        text, usage = said(CHAT, await ask(stack, **asked))
    assert (text, usage["test_time"]["ended_by"]) == ("no idea", "budget")
    assert not larger.submissions


async def test_a_doubted_draft_goes_on_where_the_larger_model_does_not_answer() -> None:
    first, larger = pair(LONG, "it is 7", step_s=0.002)
    larger.refusal = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too much waits", retry_after_s=7.0)
    async with deployed(first, larger, tables=TWO) as stack:
        text, usage = said(CHAT, await ask(stack, **UP, on_failure="answer"))
        await settled(stack)
    told = usage["test_time"]
    assert (text, told["ended_by"]) == (LONG, "failure")
    assert "too much waits" in told["failure"]
    assert [each["outcome"] for each in told["samples"]] == ["stopped", "failed", "chosen"]
    # What it had written is not written again.
    again = first.submissions[1]
    assert bytes(again.output_token_ids).decode() == LONG[: told["samples"][0]["completion_tokens"]]
    assert usage["completion_tokens"] == len(LONG) + 1


async def test_a_doubted_draft_goes_on_where_the_budget_has_no_room_for_the_larger_model(
    streams: list[DeliberateStream],
) -> None:
    first, larger = pair(LONG, "it is 7", step_s=0.002)
    async with deployed(first, larger, tables=TWO) as stack:
        text, usage = said(CHAT, await ask(stack, **UP, budget_tokens=60))
        await settled(stack)
    told = usage["test_time"]
    assert (text, told["ended_by"], told["completion_tokens"]) == (LONG, "budget", len(LONG) + 1)
    assert not larger.submissions
    (stream,) = streams
    assert stream.steps == replay(Escalate(0.8, rates=False), stream.events)


@pytest.mark.parametrize("max_tokens", [16, 20])
async def test_a_draft_that_its_limit_cut_does_not_go_on_beyond_it(max_tokens: int) -> None:
    # Doubted with its last token, by which the window is full, or cut before a check could find anything.
    scorer = {} if max_tokens == 16 else {"scorer": {"type": "number"}}
    first, larger = pair(LONG, "it is 7")
    larger.refusal = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too much waits", retry_after_s=7.0)
    async with deployed(first, larger, tables=TWO) as stack:
        test_time = {**UP, **scorer, "on_failure": "answer"}
        body = {**BODIES[CHAT], "max_tokens": max_tokens, "test_time": test_time}
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body))
    assert (text, usage["completion_tokens"]) == (LONG[:max_tokens], max_tokens)
    assert len(first.submissions) == 1


@pytest.mark.parametrize("on_failure", ["refuse", "answer"])
async def test_a_larger_model_that_does_not_answer_is_told_as_the_request_says(on_failure: str) -> None:
    first, larger = pair("no idea", "it is 7")
    larger.refusal = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too much waits", retry_after_s=7.0)
    async with deployed(first, larger, tables=TWO) as stack:
        answer = await ask(stack, **UP, scorer={"type": "number"}, on_failure=on_failure)
        await settled(stack)
    if on_failure == "refuse":
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    else:
        text, usage = said(CHAT, answer)
        assert (text, usage["test_time"]["ended_by"]) == ("no idea", "failure")
        assert "too much waits" in usage["test_time"]["failure"]


async def test_who_leaves_frees_the_larger_model_and_pays_for_both(tmp_path: Path) -> None:
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}}}
    first, larger = pair("no idea", "x" * 2000)
    larger.step_s = 0.01
    async with deployed(first, larger, tables={**TWO, **ledger}) as stack:
        asking = asyncio.create_task(ask(stack, **UP, scorer={"type": "number"}))
        async with asyncio.timeout(20):
            while larger.num_generated < 3:
                await asyncio.sleep(0.005)
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await asking
        await settled(stack)
        assert len(larger.cancels) == 1
    rows = {row[0]: row for row in in_ledger(tmp_path)}
    assert rows["tiny"][1:] == (PROMPT, 0, 8, "CANCELLED")
    assert (rows["big"][1], rows["big"][4]) == (PROMPT, "CANCELLED")
    assert 0 < rows["big"][2] <= larger.num_generated


@pytest.mark.parametrize(
    ("allowed", "model", "status", "problem"),
    [
        (("tiny",), "big", 403, "may not use model 'big'"),
        ((), "nobody", 404, "'nobody' is not served here"),
    ],
)
async def test_both_models_must_be_allowed(
    allowed: tuple[str, ...], model: str, status: int, problem: str
) -> None:
    first, larger = pair("no idea", "it is 7")
    async with deployed(first, larger, tables=TWO) as stack:
        headers = {CONTEXT_HEADER: signed_context(allowed_models=allowed)}
        body = {**BODIES[CHAT], "test_time": {**UP, "model": model}}
        refused = await stack.http.post(CHAT, json=body, headers=headers)
        assert not first.submissions
        body["test_time"]["on_failure"] = "answer"
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body, headers=headers))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (status, "test_time.model"), refused.text
    assert problem in error["message"]
    assert text == "no idea"
    assert problem in usage["test_time"]["failure"]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"test_time": {"strategy": "escalate"}}, "test_time.model"),
        ({"test_time": {"strategy": "escalate", "model": "tiny"}}, "test_time.model"),
        ({"test_time": {"strategy": "best_of", "model": "big"}}, "test_time.model"),
        ({"test_time": {**UP, "samples": 3}}, "test_time.samples"),
        ({"test_time": {**UP, "confidence": 0.001}}, "test_time.confidence"),
        ({"test_time": {"strategy": "critique_revise", "confidence": 0.9}}, "test_time.confidence"),
        (
            {"test_time": {"strategy": "critique_revise", "scorer": {"type": "number"}}},
            "test_time.scorer.type",
        ),
        ({"n": 2, "test_time": UP}, "n"),
    ],
)
async def test_what_is_wrong_in_itself_is_refused_by_name(more: dict[str, Any], field: str) -> None:
    async with deployed(*pair("a", "b"), tables=TWO) as stack:
        refused = await stack.http.post(CHAT, json={**BODIES[CHAT], **more})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


# Drafts and critiques.


def writing(*texts: str) -> Callable[[engine_pb2.Submit, int], list[int]]:
    """Parts that say this, one after another."""
    left = iter(texts)
    return lambda submit, choice: [*encode(next(left)), END_ID]


REVISE = {"strategy": "critique_revise"}


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_drafts_are_revised_until_a_critique_finds_nothing(path: str) -> None:
    engine = ScriptedEngine(
        reply=writing("it is 6", "six is wrong", "it is 7", "All good.\n**Nothing is wrong.**")
    )
    async with deployed(engine, tables=TIER) as stack:
        text, usage = said(path, await ask(stack, path, **REVISE, samples=4))
        await settled(stack)
    told = usage["test_time"]
    assert (text, told["ended_by"]) == ("it is 7", "decided")
    parts = [(each["part"], each["outcome"]) for each in told["samples"]]
    assert parts == [
        ("draft", "complete"),
        ("critique", "complete"),
        ("revision", "chosen"),
        ("critique", "complete"),
    ]
    assert told["not_begun"] == 3
    prompts = [bytes(submit.prompt_token_ids).decode() for submit in engine.submissions]
    # Each goes on from what was said before, so that engines have its beginning.
    assert all(prompt.startswith(prompts[0]) for prompt in prompts)
    assert prompts[2].startswith(prompts[1])
    assert "six is wrong" in prompts[2]
    assert "it is 7" in prompts[3]
    assert "it is 6" not in prompts[3]
    (spent,) = told["models"]
    assert spent["prompt_tokens"] == sum(map(len, prompts)) == prompt_tokens(usage)


async def test_the_last_draft_is_the_answer_where_critiques_go_on_and_a_pattern_may_settle_it() -> None:
    texts = ("one", "bad", "two", "bad", "three")
    async with deployed(ScriptedEngine(reply=writing(*texts)), tables=TIER) as stack:
        text, usage = said(CHAT, await ask(stack, **REVISE))
    assert (text, usage["test_time"]["ended_by"]) == ("three", "all_samples")
    async with deployed(ScriptedEngine(reply=writing(*texts)), tables=TIER) as stack:
        scorer = {"type": "regex", "pattern": "^bad$"}
        text, usage = said(CHAT, await ask(stack, **REVISE, scorer=scorer))
    assert (text, usage["test_time"]["ended_by"]) == ("one", "decided")


async def test_a_critique_is_not_held_to_the_answers_form_and_calls_of_tools_are_not_criticised() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    engine = ScriptedEngine(reply=writing("{}", "nothing is wrong"))
    async with deployed(engine, tables=TIER) as stack:
        body = {**BODIES[CHAT], "response_format": form, "test_time": REVISE}
        await stack.http.post(CHAT, json=body)
    assert [submit.HasField("grammar") for submit in engine.submissions] == [True, False]
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    engine = ScriptedEngine(reply=writing(call))
    async with deployed(engine, tables=TIER) as stack:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        body = {**BODIES[CHAT], "max_tokens": 100, "tools": tools, "test_time": REVISE}
        answer = (await stack.http.post(CHAT, json=body)).json()
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    assert len(answer["usage"]["test_time"]["samples"]) == 1


async def test_a_budget_ends_revisions_with_the_last_draft_and_a_salt_holds_for_all(tmp_path: Path) -> None:
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}}}
    engine = ScriptedEngine(reply=writing("one", "bad", "two", "bad", "three"))
    async with deployed(engine, tables={**TIER, **ledger}) as stack:
        body = {**BODIES[CHAT], "cache_salt": "mine", "temperature": 0}
        body["test_time"] = {**REVISE, "budget_tokens": 70}
        text, usage = said(CHAT, await stack.http.post(CHAT, json=body))
        await settled(stack)
    assert (text, usage["test_time"]["ended_by"]) == ("two", "budget")
    assert len({submit.context.payload for submit in engine.submissions}) >= 1
    rows = in_ledger(tmp_path)
    assert len(rows) == 3
    assert sum(row[1] for row in rows) == usage["prompt_tokens"]
    assert sum(row[2] + row[3] for row in rows) == usage["completion_tokens"]


# Strategies alone.


def ended(index: int, **fields: Any) -> Sample:
    return Sample(index=index, **{"is_complete": True, **fields})


def test_the_same_events_lead_to_the_same_steps() -> None:
    events: list[Event] = [
        Grown(index=0, confidences=(-0.01,) * 20),
        Grown(index=0, confidences=(-3.0,) * 4),
        Grown(index=0, confidences=(-3.0,) * 4),
        ended(1),
    ]
    steps = replay(Escalate(0.8, rates=False), events)
    assert steps == replay(Escalate(0.8, rates=False), events)
    assert [step.start for step in steps] == [1, 0, 1, 0, 0]
    assert steps[2].end == (0,)
    assert steps[-1].winner == 1


def test_a_draft_is_better_than_half_an_answer() -> None:
    events: list[Event] = [
        ended(0),
        Rated(scores={0: 0.1}),
        ended(1, is_complete=False),
        Concluded(ended_by="deadline"),
    ]
    assert replay(Escalate(0.8, rates=True), events)[3].winner == 0
    failed = [ended(0, is_answer=False, is_complete=False), ended(1, is_complete=False)]
    assert replay(Escalate(0.8, rates=False), failed)[-1].winner == 1


def test_a_critique_that_was_cut_ends_with_the_draft_before_it() -> None:
    events: list[Event] = [ended(0), ended(1, is_complete=False)]
    step = replay(CritiqueRevise(3), events)[-1]
    assert (step.winner, step.ended_by) == (0, "all_samples")
    events[1] = ended(1, is_complete=False, is_answer=False)
    step = replay(CritiqueRevise(3), events)[-1]
    assert (step.winner, step.ended_by) == (0, "failure")


@pytest.mark.parametrize(
    ("text", "is_settled"),
    [
        ("NOTHING IS WRONG", True),
        ("Step 1 holds.\n\n> *Nothing is wrong*.\n```\n", True),
        ("Nothing is wrong with step 1, but step 2 is wrong.", False),
        ("Nothing is wrong\nexcept the sum", False),
        ("", False),
    ],
)
def test_a_critiques_last_line_says_whether_something_is_wrong(text: str, is_settled: bool) -> None:
    assert (settled_by(None)(text) is not None) is is_settled
