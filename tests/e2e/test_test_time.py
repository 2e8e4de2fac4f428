"""Thinking longer over the real stack: votes of the bundled model stop early, and every book agrees."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from gateway.test_time.ballots import last_number
from gateway.test_time.strategies import Sample, SelfConsistency
from observability.emit import names
from services.supervisor.config import ROOT
from tests.e2e.stack import CONFIG, LIMIT_S, Stack, eventually, running_stack

SAMPLES = 8
MAX_TOKENS = 64
BLOCK_TOKENS = 16


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose standard tier may think longer."""
    config = f"{CONFIG}\n[tiers.standard.test_time]\nmax_samples = {SAMPLES}\n"
    with running_stack(tmp_path_factory.mktemp("thinking"), config=config) as stack:
        yield stack
        stack.assert_nothing_leaked()


def ask(stack: Stack, content: str, **fields: Any) -> httpx.Response:
    body = {
        "model": fields.pop("model", None) or stack.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_TOKENS,
        "seed": 7,
        **fields,
    }
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    answer = httpx.post(
        f"{stack.url}/v1/chat/completions", json=body, headers=headers, timeout=LIMIT_S, trust_env=False
    )
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def rows(stack: Stack, request_id: str) -> list[Any]:
    with open_ledger(f"sqlite:///{stack.directory}/ledger.sqlite").connect() as connection:
        of_request = select(REQUESTS).where(REQUESTS.c.request_id == request_id)
        return list(connection.execute(of_request).mappings())


def computed(stack: Stack) -> float:
    """Prompt tokens that engines had to compute."""
    readings = stack.metrics("engine")
    return sum(each.value(names.PREFIX_QUERIES) - each.value(names.PREFIX_HITS) for each in readings)


def test_votes_on_a_sum_stop_early_and_usage_ledger_and_trace_add_up(thinking: Stack) -> None:
    asked = {"strategy": "self_consistency", "samples": SAMPLES, "scorer": {"type": "number"}}
    answer = ask(thinking, "What is 47 + 85?", temperature=0.3, test_time=asked)
    usage = answer.json()["usage"]
    told, request_id = usage["test_time"], answer.headers["x-request-id"]
    assert "132" in answer.json()["choices"][0]["message"]["content"]
    assert max(told["votes"], key=told["votes"].get) == "132"
    assert told["ended_by"] == "decided"
    assert len(told["samples"]) + told["not_begun"] == SAMPLES
    assert told["not_begun"] >= SAMPLES // 4
    lengths = [each["completion_tokens"] for each in told["samples"]]
    assert sum(lengths) == told["completion_tokens"] == usage["completion_tokens"]

    assert eventually(lambda: bool(rows(thinking, request_id)))
    (row,) = rows(thinking, request_id)
    chosen = next(each for each in told["samples"] if each["outcome"] == "chosen")
    assert row["completion_tokens"] == chosen["completion_tokens"]
    assert row["completion_tokens"] + row["candidate_tokens"] == usage["completion_tokens"]
    assert row["prompt_tokens"] == usage["prompt_tokens"]

    spans = thinking.trace(request_id, [names.GATEWAY_SAMPLE, names.ENGINE_REQUEST])
    (request,) = [span for span in spans if span.name == names.GATEWAY_REQUEST]
    samples = [span for span in spans if span.name == names.GATEWAY_SAMPLE]
    assert {span.parent_id for span in samples} == {request.span_id}
    assert len(samples) == len(lengths)
    assert thinking.command("trace", request_id).count(names.GATEWAY_SAMPLE) == len(lengths)


def test_the_votes_are_those_of_n(thinking: Stack) -> None:
    asked = {"strategy": "best_of", "samples": 4}
    told = ask(thinking, "What is 23 + 58?", test_time=asked).json()
    whole = ask(thinking, "What is 23 + 58?", n=4, logprobs=True).json()
    lengths = [len(each["logprobs"]["content"]) for each in whole["choices"]]
    assert [each["completion_tokens"] for each in told["usage"]["test_time"]["samples"]] == lengths
    chosen = [each["outcome"] for each in told["usage"]["test_time"]["samples"]].index("chosen")
    assert told["choices"][0]["message"] == whole["choices"][chosen]["message"]


def offline(answer: dict[str, Any], confidence: float) -> tuple[int, dict[str, float]]:
    """How many of recorded answers are asked for until a vote is decided, and the votes."""
    strategy = SelfConsistency(SAMPLES, confidence)
    step, num_begun = strategy.begin(), 0
    while not step.ended_by:
        begun, num_begun = range(num_begun, num_begun + step.start), num_begun + step.start
        for index in begun:
            choice = answer["choices"][index]
            is_complete = choice["finish_reason"] == "stop"
            vote = last_number(choice["message"]["content"]) if is_complete else None
            step = strategy.take(Sample(index=index, is_complete=is_complete, vote=vote))
            if step.ended_by:
                break
    return num_begun, dict(strategy.votes())


def test_votes_are_decided_as_over_a_record_of_all_samples(thinking: Stack) -> None:
    asked = {"strategy": "self_consistency", "samples": SAMPLES, "scorer": {"type": "number"}}
    for content in ("What is 23 + 58?", "What is 61 - 17?", "What is 4 + 5?"):
        whole = ask(thinking, content, n=SAMPLES).json()
        num_begun, votes = offline(whole, 0.95)
        told = ask(thinking, content, test_time=asked).json()["usage"]["test_time"]
        assert SAMPLES - told["not_begun"] == num_begun
        assert told["votes"] == votes


def test_a_prompt_is_computed_once_for_all_samples_and_again_under_another_salt(thinking: Stack) -> None:
    prompt = "Bob keeps a list of names and numbers. " * 20 + "What is 12 + 21?"
    asked = {"strategy": "best_of", "samples": SAMPLES}
    before = computed(thinking)
    usage = ask(thinking, prompt, test_time=asked, cache_salt="one").json()["usage"]
    num_tokens = usage["prompt_tokens"]
    assert num_tokens > 10 * BLOCK_TOKENS
    # The others compute the part of a block that a cache does not keep.
    first = computed(thinking) - before
    assert num_tokens - BLOCK_TOKENS <= first <= num_tokens + (SAMPLES - 1) * BLOCK_TOKENS
    ask(thinking, prompt, test_time=asked, cache_salt="one")
    again = computed(thinking) - before - first
    assert again <= SAMPLES * BLOCK_TOKENS
    ask(thinking, prompt, test_time=asked, cache_salt="two")
    assert computed(thinking) - before - first - again >= num_tokens - BLOCK_TOKENS


def test_a_draft_is_criticised_and_every_part_has_its_row(thinking: Stack) -> None:
    asked = {"strategy": "critique_revise", "samples": 2}
    answer = ask(thinking, "What is 47 + 85?", temperature=0, test_time=asked)
    usage, request_id = answer.json()["usage"], answer.headers["x-request-id"]
    told = usage["test_time"]
    parts = [each["part"] for each in told["samples"]]
    assert parts == ["draft", "critique", "revision"][: len(parts)]
    assert len(parts) > 1
    assert eventually(lambda: len(rows(thinking, request_id)) == len(parts))
    found = rows(thinking, request_id)
    assert sum(row["prompt_tokens"] for row in found) == usage["prompt_tokens"]
    spent = sum(row["completion_tokens"] + row["candidate_tokens"] for row in found)
    assert spent == usage["completion_tokens"] == told["completion_tokens"]
    spans = thinking.trace(request_id, [names.GATEWAY_SAMPLE, names.GATEWAY_REQUEST])
    requests = {span.span_id: span for span in spans if span.name == names.GATEWAY_REQUEST}
    below = [span for span in requests.values() if span.parent_id in requests]
    assert len(below) == len(parts) - 1


def test_a_model_that_is_asked_judges_samples(thinking: Stack) -> None:
    scorer = {"type": "verifier", "model": thinking.model}
    asked = {"strategy": "best_of", "samples": 2, "scorer": scorer}
    answer = ask(thinking, "What is 47 + 85?", test_time=asked)
    told, request_id = answer.json()["usage"]["test_time"], answer.headers["x-request-id"]
    scores = [each["score"] for each in told["samples"]]
    assert all(0 <= score <= 1 for score in scores)
    chosen = [each["outcome"] for each in told["samples"]].index("chosen")
    assert scores[chosen] == max(scores)
    assert eventually(lambda: len(rows(thinking, request_id)) == 3)
    found = rows(thinking, request_id)
    judged = [row for row in found if not row["candidate_tokens"]]
    spent = sum(row["prompt_tokens"] + row["completion_tokens"] for row in judged)
    assert spent == told["scorer_tokens"]


def test_steps_are_searched_and_what_they_go_on_from_is_not_computed_again(thinking: Stack) -> None:
    asked = {"strategy": "search", "samples": SAMPLES, "delimiter": " "}
    before = computed(thinking)
    answer = ask(thinking, "What is 47 + 85?", test_time=asked, cache_salt="search")
    usage, request_id = answer.json()["usage"], answer.headers["x-request-id"]
    told = usage["test_time"]
    assert len(told["samples"]) > SAMPLES
    assert len(told["samples"]) % SAMPLES == 0 or told["ended_by"] != "decided"
    lengths = [each["completion_tokens"] for each in told["samples"]]
    assert sum(lengths) == told["completion_tokens"] == usage["completion_tokens"]
    # Of a prompt and a path each step computes what a cache keeps no block of.
    assert computed(thinking) - before <= usage["prompt_tokens"] + len(lengths) * 2 * BLOCK_TOKENS
    assert eventually(lambda: bool(rows(thinking, request_id)))
    (row,) = rows(thinking, request_id)
    assert row["completion_tokens"] + row["candidate_tokens"] == usage["completion_tokens"]
    # The trace is the tree: a level's steps are below those that they go on from.
    spans = thinking.trace(request_id, [names.GATEWAY_SAMPLE, names.GATEWAY_REQUEST])
    (request,) = [span for span in spans if span.name == names.GATEWAY_REQUEST]
    steps = {span.span_id: span for span in spans if span.name == names.GATEWAY_SAMPLE}
    assert len(steps) == len(lengths)
    later = [span for span in steps.values() if span.parent_id != request.span_id]
    assert len(later) == len(lengths) - SAMPLES
    assert all(span.parent_id in steps for span in later)


def blocks_held(stack: Stack) -> int:
    """Blocks that some request holds, as engines count them."""
    return sum(each.num_total_blocks - each.num_unreferenced_blocks for each in stack.invariants())


async def most_blocks(stack: Stack, **fields: Any) -> int:
    """Blocks that a request of a long prompt holds at most, where nothing else runs."""
    # Some 1,200 tokens, beside which what each sample writes is little.
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Bob keeps a list of names and numbers. " * 100}],
        "max_tokens": MAX_TOKENS,
        "min_tokens": MAX_TOKENS,
        **fields,
    }
    headers = {"authorization": f"Bearer {stack.state.api_key}"}
    async with httpx.AsyncClient(
        base_url=stack.url, headers=headers, timeout=LIMIT_S, trust_env=False
    ) as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        most = 0
        while not asking.done():
            most = max(most, await asyncio.to_thread(blocks_held, stack))
        assert (await asking).status_code == httpx.codes.OK
    return most


async def test_eight_samples_of_a_long_prompt_hold_little_more_than_one(thinking: Stack) -> None:
    # The second one has its prompt from the beginning, so that whenever it is looked at it is whole.
    await most_blocks(thinking)
    one = await most_blocks(thinking)
    assert one > 1000 / BLOCK_TOKENS
    asked = {"strategy": "best_of", "samples": SAMPLES}
    assert one < await most_blocks(thinking, test_time=asked) <= 1.6 * one


WAYS: list[dict[str, Any]] = [
    {"strategy": "best_of", "samples": SAMPLES},
    {"strategy": "best_of", "samples": 2, "scorer": {"type": "verifier", "model": ""}},
    {"strategy": "self_consistency", "samples": SAMPLES},
    {"strategy": "deepconf", "samples": SAMPLES},
    {"strategy": "critique_revise", "samples": 2},
    {"strategy": "search", "samples": SAMPLES, "delimiter": " "},
]


async def test_64_requests_beside_chats_change_none_and_leave_blocks_whole(thinking: Stack) -> None:
    headers = {"authorization": f"Bearer {thinking.state.api_key}"}
    WAYS[1]["scorer"]["model"] = thinking.model

    async with httpx.AsyncClient(
        base_url=thinking.url, headers=headers, timeout=4 * LIMIT_S, trust_env=False, limits=httpx.Limits()
    ) as client:

        async def asked(number: int, **fields: Any) -> httpx.Response:
            content = f"What is {10 + number} + {7 * number % 90}?"
            body = {"model": thinking.model, "messages": [{"role": "user", "content": content}], **fields}
            return await client.post("/v1/chat/completions", json={"max_tokens": 48, "seed": number, **body})

        def text(answer: httpx.Response) -> str:
            assert answer.status_code == httpx.codes.OK, answer.text
            return str(answer.json()["choices"][0]["message"]["content"])

        alone = [text(await asked(number, temperature=0)) for number in range(8)]
        thinks = [
            asyncio.create_task(asked(number, test_time=WAYS[number % len(WAYS)])) for number in range(64)
        ]
        beside = [asyncio.create_task(asked(number, temperature=0)) for number in range(8)]
        await asyncio.wait(thinks, return_when=asyncio.FIRST_COMPLETED)
        gone = [task for task in thinks[::2] if not task.done()]
        for task in gone:
            task.cancel()
        await asyncio.wait(thinks)
        for task in thinks:
            if task not in gone:
                assert text(task.result())
        assert [text(await each) for each in beside] == alone
    thinking.assert_nothing_leaked()


BUNDLED = ROOT / "models"
TWO_MODELS = f"""
{CONFIG}
[tiers.standard.test_time]
[models.big]
path = "{BUNDLED}/millrace-nano"
[models.small]
path = "{BUNDLED}/millrace-nano-draft"
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A small model and a larger one."""
    folder = tmp_path_factory.mktemp("two")
    with running_stack(folder, "--engines", "2", config=TWO_MODELS, model=None) as stack:
        yield stack
        stack.assert_nothing_leaked()


def test_a_larger_model_answers_as_it_would_have_alone_where_the_small_one_is_doubted(models: Stack) -> None:
    asked = {"strategy": "escalate", "model": "big", "confidence": 0.999}
    greedy = {"temperature": 0, "model": "small"}
    alone = ask(models, "What is 47 + 85?", **{**greedy, "model": "big"}).json()
    answer = ask(models, "What is 47 + 85?", **greedy, test_time=asked)
    usage, request_id = answer.json()["usage"], answer.headers["x-request-id"]
    draft, larger = usage["test_time"]["samples"]
    assert (larger["model"], larger["outcome"]) == ("big", "chosen")
    assert answer.json()["choices"][0]["message"] == alone["choices"][0]["message"]
    assert [each["model"] for each in usage["test_time"]["models"]] == ["small", "big"]
    assert eventually(lambda: len(rows(models, request_id)) == 2)
    found = {row["model"]: row for row in rows(models, request_id)}
    assert found["big"]["completion_tokens"] == larger["completion_tokens"]
    assert found["small"]["completion_tokens"] == 0
    assert found["small"]["candidate_tokens"] == draft["completion_tokens"] <= MAX_TOKENS
    believed = ask(models, "What is 47 + 85?", **greedy, test_time={**asked, "confidence": 0.01}).json()
    assert [each["outcome"] for each in believed["usage"]["test_time"]["samples"]] == ["chosen"]
