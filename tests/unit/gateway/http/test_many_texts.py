"""Many texts of one request travel together: what that costs, and that no promise gets worse by it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from millrace.common.v1 import context_pb2
from sqlalchemy import select

from gateway.engines import text_stream
from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.context import CONTEXT_HEADER, sign, to_header
from tests.unit.gateway.rig.deployment import SECRET, Deployment, deployed
from tests.unit.gateway.rig.pooling import PoolingEngine, PoolingTokenizer
from tests.unit.gateway.rig.vocabulary import encode

TEXTS = [f"text {index}" for index in range(300)]


async def ask(rig: Deployment, texts: list[str], **options: Any) -> httpx.Response:
    return await rig.http.post("/v1/embeddings", json={"model": "tiny", "input": texts, **options})


def tables(folder: Path) -> dict[str, Any]:
    ledger = {"ledger": {"url": f"sqlite:///{folder}/ledger.sqlite"}}
    return {"tenant": {"tokens_per_minute": 100_000}, "gateway": ledger}


def in_ledger(folder: Path) -> list[tuple[str, int]]:
    """(outcome, prompt tokens) of every row."""
    columns = (REQUESTS.c.outcome, REQUESTS.c.prompt_tokens)
    with open_ledger(f"sqlite:///{folder}/ledger.sqlite").connect() as connection:
        return [tuple(row) for row in connection.execute(select(*columns))]  # type: ignore[misc]


def lengths(answer: httpx.Response) -> list[float]:
    return [each["embedding"][0] for each in answer.json()["data"]]


async def test_they_are_one_call_one_submission_one_reservation_and_one_row(tmp_path: Path) -> None:
    engine, tokenizer = PoolingEngine(), PoolingTokenizer()
    num_tokens = sum(len(encode(text)) for text in TEXTS)
    async with deployed(engine, tokenizer=tokenizer, tables=tables(tmp_path)) as rig:
        answer = await ask(rig, TEXTS)
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 100_000 - num_tokens
    assert lengths(answer) == [len(encode(text)) for text in TEXTS]
    assert answer.json()["usage"]["prompt_tokens"] == num_tokens
    assert [len(each.texts.texts) for each in tokenizer.prepared] == [len(TEXTS)]
    assert [len(each.pooling.texts) for each in engine.submissions] == [len(TEXTS)]
    assert in_ledger(tmp_path) == [("stop", num_tokens)]


async def test_an_engine_has_a_bounded_part_of_them_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_stream, "TOGETHER", 256)
    engine = PoolingEngine()
    engine.gate.clear()
    async with deployed(engine, tokenizer=PoolingTokenizer()) as rig:
        asking = asyncio.create_task(ask(rig, TEXTS))
        while not engine.left:
            await asyncio.sleep(0.005)
        under_way = sum(len(each.prompt_token_ids) for each in engine.submissions)
        engine.gate.set()
        answer = await asking
    assert under_way < 256
    assert lengths(answer) == [len(encode(text)) for text in TEXTS]
    assert 3 < len(engine.submissions) < len(TEXTS) / 3


async def test_another_engine_goes_on_with_those_that_are_left(tmp_path: Path) -> None:
    first, second = PoolingEngine(name="one", dies_after_texts=40), PoolingEngine(name="two")
    second.gate.clear()
    async with deployed(first, second, tokenizer=PoolingTokenizer(), tables=tables(tmp_path)) as rig:
        # Which of both gets them is routing's matter: the one that waits has none of its own.
        asking = asyncio.create_task(ask(rig, TEXTS))
        while not (first.left or second.left):
            await asyncio.sleep(0.005)
        if second.left:
            first.dies_after_texts, second.dies_after_texts = -1, 40
        second.gate.set()
        answer = await asking
    assert answer.status_code == 200, answer.text
    assert lengths(answer) == [len(encode(text)) for text in TEXTS]
    assert sorted(first.read + second.read) == sorted(encode(text) for text in TEXTS)
    assert in_ledger(tmp_path) == [("stop", sum(len(encode(text)) for text in TEXTS))]


@pytest.mark.parametrize(("text", "reason"), [("impossible", "no such text"), ("poison", "not finite")])
async def test_a_text_at_fault_is_named_by_its_index(text: str, reason: str) -> None:
    engine = PoolingEngine()
    async with deployed(engine, tokenizer=PoolingTokenizer()) as rig:
        answer = await ask(rig, [*TEXTS[:7], text, *TEXTS[7:]])
        assert rig.gateway.num_open == 0
    error = answer.json()["error"]
    assert error["param"] == "input[7]"
    assert reason in error["message"]


async def test_texts_that_are_megabytes_take_several_calls_and_keep_their_numbers() -> None:
    tokenizer = PoolingTokenizer()
    texts = ["x" * 400_000] * 4
    async with deployed(PoolingEngine(max_model_len=1 << 20), tokenizer=tokenizer) as rig:
        answer = await ask(rig, texts)
        refused = await ask(rig, [*texts, "impossible"])
    assert lengths(answer) == [400_000.0] * 4
    assert [len(each.texts.texts) for each in tokenizer.prepared[:2]] == [2, 2]
    assert refused.json()["error"]["param"] == "input[4]"


async def test_who_leaves_pays_for_what_was_read(tmp_path: Path) -> None:
    engine = PoolingEngine(ungated=5)
    engine.gate.clear()
    async with deployed(engine, tokenizer=PoolingTokenizer(), tables=tables(tmp_path)) as rig:
        asking = asyncio.create_task(ask(rig, TEXTS))
        while len(engine.read) < 5:
            await asyncio.sleep(0.005)
        asking.cancel()
        while not engine.cancels or rig.gateway.num_open:
            await asyncio.sleep(0.005)
    assert in_ledger(tmp_path) == [("CANCELLED", sum(len(encode(text)) for text in TEXTS[:5]))]


async def test_a_deadline_ends_all_of_them(tmp_path: Path) -> None:
    engine = PoolingEngine()
    engine.gate.clear()
    async with deployed(engine, tokenizer=PoolingTokenizer(), tables=tables(tmp_path)) as rig:
        context = context_pb2.RequestContext(request_id="late", tenant="acme", key_id="k1", tier="standard")
        context.issued_unix_ms = time.time_ns() // 1_000_000
        context.deadline_unix_ms = context.issued_unix_ms + 300
        rig.http.headers[CONTEXT_HEADER] = to_header(sign(context, SECRET.encode()))
        answer = await ask(rig, TEXTS)
        assert rig.gateway.num_open == 0
    assert answer.status_code == 504
    assert in_ledger(tmp_path) == [("DEADLINE_EXCEEDED", 0)]
