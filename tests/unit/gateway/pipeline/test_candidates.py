"""Candidates and beams: what is computed and not returned is paid for, also by those who do not wait."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import select

from gateway.ledger.journal import _read
from gateway.ledger.tables import REQUESTS, open_ledger
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine, hello
from tests.unit.gateway.rig.vocabulary import encode

PROMPT = "a prompt of some length"
NUM_CANDIDATE_TOKENS = 21


async def remaining_tokens(rig: Deployment) -> int:
    """What the tenant may still use in this minute, the request that asks counted."""
    return int((await ask(rig, prompt="x", max_tokens=1)).headers["x-ratelimit-remaining-tokens"])


async def ask(rig: Deployment, **body: Any) -> httpx.Response:
    answer = await rig.http.post("/v1/completions", json={"model": "tiny", "prompt": PROMPT, **body})
    assert answer.status_code == 200, answer.text
    return answer


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(candidate_tokens=NUM_CANDIDATE_TOKENS)


def tables(folder: Path, **tenant: int) -> dict[str, Any]:
    return {"tenant": tenant, "gateway": {"ledger": {"url": f"sqlite:///{folder}/ledger.sqlite"}}}


def in_ledger(folder: Path) -> tuple[int, int, int]:
    """(prompt, completion, candidate) tokens of the one request that asked for candidates."""
    columns = (REQUESTS.c.prompt_tokens, REQUESTS.c.completion_tokens, REQUESTS.c.candidate_tokens)
    with open_ledger(f"sqlite:///{folder}/ledger.sqlite").connect() as connection:
        (row,) = connection.execute(select(*columns).where(REQUESTS.c.prompt_tokens == len(encode(PROMPT))))
    return tuple(row)  # type: ignore[return-value]


@pytest.mark.parametrize("more", [{"best_of": 4}, {"beam_width": 4}])
async def test_limits_usage_and_ledger_have_all_that_was_computed(
    engine: ScriptedEngine, more: dict[str, int], tmp_path: Path
) -> None:
    num_prompt, num_answer = len(encode(PROMPT)), len(hello(None, 0))  # type: ignore[arg-type]
    async with deployed(engine, tables=tables(tmp_path, tokens_per_minute=10_000)) as rig:
        answer = await ask(rig, max_tokens=10, **more)
        # All that four may take is reserved.
        assert int(answer.headers["x-ratelimit-remaining-tokens"]) == 10_000 - num_prompt - 4 * 10
        used = num_prompt + num_answer + NUM_CANDIDATE_TOKENS
        assert answer.json()["usage"]["total_tokens"] == used
        engine.candidate_tokens = 0
        assert await remaining_tokens(rig) == 10_000 - used - 2
    assert in_ledger(tmp_path) == (num_prompt, num_answer, NUM_CANDIDATE_TOKENS)


async def test_what_is_computed_so_far_is_in_the_journal_and_counts_no_more_at_the_end(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    def in_journal() -> list[tuple[int, int, int]]:
        (path,) = (tmp_path / "ledger.sqlite-open").glob("*.open")
        found = [each.request for each in _read(path.read_bytes(), 0)[0]]
        return [(each.prompt_tokens, each.completion_tokens, each.candidate_tokens) for each in found]

    num_prompt, num_answer = len(encode(PROMPT)), len(hello(None, 0))  # type: ignore[arg-type]
    async with deployed(engine, tables=tables(tmp_path)) as rig:
        engine.gate.clear()
        asking = asyncio.create_task(ask(rig, max_tokens=10, best_of=4))
        async with asyncio.timeout(10):
            while in_journal() != [(num_prompt, 0, NUM_CANDIDATE_TOKENS - 1)]:
                await asyncio.sleep(0.005)
        engine.gate.set()
        answer = (await asking).json()
        assert answer["usage"]["completion_tokens"] == num_answer + NUM_CANDIDATE_TOKENS
    assert in_ledger(tmp_path) == (num_prompt, num_answer, NUM_CANDIDATE_TOKENS)


async def test_whoever_leaves_pays_for_what_was_computed(engine: ScriptedEngine, tmp_path: Path) -> None:
    num_prompt = len(encode(PROMPT))
    async with deployed(engine, tables=tables(tmp_path, tokens_per_minute=10_000)) as rig:
        engine.gate.clear()
        asking = asyncio.create_task(ask(rig, max_tokens=10, best_of=4))
        while engine.num_running == 0:
            await asyncio.sleep(0.001)
        asking.cancel()
        with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
            await asking
        async with asyncio.timeout(10):
            while rig.gateway.num_open:
                await asyncio.sleep(0.005)
        engine.gate.set()
        engine.candidate_tokens = 0
        assert await remaining_tokens(rig) == 10_000 - num_prompt - NUM_CANDIDATE_TOKENS - 2
    assert in_ledger(tmp_path) == (num_prompt, 0, NUM_CANDIDATE_TOKENS)


async def test_what_a_month_has_left_is_shared_by_all_candidates(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    engine.candidate_tokens = 0
    num_prompt = len(encode(PROMPT))
    async with deployed(engine, tables=tables(tmp_path, monthly_tokens=num_prompt + 14)) as rig:
        answer = await ask(rig, max_tokens=10, best_of=4, min_tokens=5)
        # 14 are left for four of them.
        assert engine.submissions[0].sampling.max_tokens == 3
        assert engine.submissions[0].sampling.min_tokens == 3
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        refused = await rig.http.post(
            "/v1/completions", json={"model": "tiny", "prompt": "x", "best_of": 128, "max_tokens": 1}
        )
        assert refused.json()["error"]["reason"] == "BUDGET_EXHAUSTED"


@pytest.mark.parametrize("more", [{"best_of": 4}, {"beam_width": 4}])
async def test_ranked_answers_of_any_length_end_where_their_log_probabilities_must(
    engine: ScriptedEngine, more: dict[str, int]
) -> None:
    limits = {"gateway": {"request": {"max_ranked_logprobs": 60}}}
    async with deployed(engine, tables=limits) as rig:
        # Five alternatives and the token itself, of two answers.
        asked = {"model": "tiny", "prompt": PROMPT, "n": 2, "logprobs": 5, **more}
        for max_tokens, expected in ((None, 5), (5, 5), (4, 4)):
            await ask(rig, **{**asked, "max_tokens": max_tokens})
            assert engine.submissions[-1].sampling.max_tokens == expected
        for refused in ({"max_tokens": 6}, {"max_tokens": None, "min_tokens": 6}):
            answer = await rig.http.post("/v1/completions", json={**asked, **refused})
            assert answer.json()["error"]["param"] == "logprobs"
            assert "72 log-probabilities" in answer.json()["error"]["message"]
