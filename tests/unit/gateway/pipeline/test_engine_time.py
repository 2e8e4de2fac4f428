"""The ledger hears what engines have spent on a request, however that ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

SPENT_S = 0.75


def engine_of(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        reply=lambda submit, choice: encode("a long story " * 40), engine_s=SPENT_S, **options
    )


def rows(url: str) -> list[Any]:
    with open_ledger(url).connect() as connection:
        return list(connection.execute(select(REQUESTS)).mappings())


async def leave(http: httpx.AsyncClient) -> None:
    """A client that goes after the first chunk."""
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        async for _ in answer.aiter_lines():
            return


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.sqlite"


@pytest.mark.parametrize("how", ["whole", "stop string", "leaves", "choices"])
async def test_what_was_spent_is_in_the_row(how: str, url: str) -> None:
    engine = engine_of(step_s=0.01 if how == "leaves" else 0.0)
    async with deployed(engine, tables={"gateway": {"ledger": {"url": url}}}) as stack:
        if how == "leaves":
            await leave(stack.http)
        else:
            asked = {"whole": {}, "stop string": {"stop": ["story"]}, "choices": {"n": 3}}[how]
            assert (await stack.chat(max_tokens=50, **asked)).status_code == 200
        while not rows(url):
            await asyncio.sleep(0.01)
    (row,) = rows(url)
    assert row["outcome"] == {"stop string": "stop", "leaves": "CANCELLED"}.get(how, "length")
    assert row["engine_decode_s"] == SPENT_S * (3 if how == "choices" else 1)
    assert row["engine_prefill_s"] == 0
    # Told or not: on their way to the client that left, or behind the stop string.
    told = row["completion_tokens"] + row["candidate_tokens"]
    assert told + row["unclaimed_tokens"] == engine.num_generated
    assert (row["unclaimed_tokens"] > 0) or how in ("whole", "choices", "leaves")


async def test_a_gateway_that_ends_keeps_what_it_waits_for(url: str) -> None:
    engine = engine_of(step_s=0.01)
    async with deployed(engine, tables={"gateway": {"ledger": {"url": url}}}) as stack:
        asking = asyncio.create_task(leave(stack.http))
        await asking
        # The engine's last word may not have come yet.
    (row,) = rows(url)
    assert row["outcome"] == "CANCELLED"


async def test_the_clients_words_are_kept(url: str) -> None:
    headers = {"x-client-request-id": "order-17", "x-stainless-retry-count": "2"}
    async with deployed(engine_of(), tables={"gateway": {"ledger": {"url": url}}}) as stack:
        for more in (headers, {"x-stainless-retry-count": "many"}):
            answer = await stack.http.post(
                "/v1/chat/completions",
                json={"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]},
                headers={CONTEXT_HEADER: signed_context(), **more},
            )
            assert answer.status_code == 200
    told = [(row["client_request_id"], row["num_retries"], row["path"]) for row in rows(url)]
    assert sorted(told) == [("", 0, "cached"), ("order-17", 2, "cached")]
