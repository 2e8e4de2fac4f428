"""A cheaper model answers before a request is refused for load; the answer says so, and may be forbidden."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from contract.errors import MillraceError, Reason
from tests.unit.gateway.models.test_served import TWO, answer, engine
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine

FULL = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too much waits; come back later", retry_after_s=7.0)
FALLBACK = {"served": TWO, "tier": {"fallback": {"big": "small"}}}


class TakesOne(ScriptedEngine):
    """Refuses what comes while something runs, as an engine does whose tier's target cannot be met."""

    async def _serve(self, submit: Any, outputs: Any) -> None:
        self.refusal = FULL if self.num_running else None
        await super()._serve(submit, outputs)


async def refused(stack: Deployment, **body: Any) -> dict[str, Any]:
    response = await stack.chat(**body)
    assert response.status_code == 429, response.text
    assert response.headers["retry-after"] == "7"
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_the_cheaper_model_answers_and_the_answer_names_it() -> None:
    big, small = engine("big", refusal=FULL), engine("small")
    async with deployed(big, small, tables=FALLBACK) as stack:
        assert await answer(stack, model="big") == ("small", "I am small")
        events = await stack.events(
            "/v1/chat/completions", model="big", messages=[{"role": "user", "content": "hi"}]
        )
        assert {event["model"] for event in events} == {"small"}
        assert (await refused(stack, model="big", allow_fallback=False))["reason"] == "QUEUE_LIMIT_EXCEEDED"
        # Another tier names none.
        await refused(stack, model="big", service_tier="fast")
        page = (await stack.http.get("/metrics")).text
        assert 'millrace_fallbacks_total{fallback="small",model="big",reason="QUEUE_LIMIT_EXCEEDED"' in page
        assert not stack.gateway.num_open


@pytest.mark.usefixtures("impatient")
async def test_a_model_without_engines_is_replaced_too() -> None:
    async with deployed(engine("small"), tables=FALLBACK) as stack:
        # How long a prompt may be is not known without an engine.
        assert await answer(stack, model="big") == ("small", "I am small")


async def test_what_the_cheaper_model_refuses_as_well_gets_the_first_refusal() -> None:
    other = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "full here, too", retry_after_s=1.0)
    big, small = engine("big", refusal=FULL), engine("small", refusal=other)
    async with deployed(big, small, tables=FALLBACK) as stack:
        assert "too much waits" in (await refused(stack, model="big"))["message"]
        assert len(small.submissions) == 1
        assert not stack.gateway.num_open


async def test_ids_of_one_vocabulary_are_not_sent_to_a_model_of_another() -> None:
    async with deployed(engine("big", refusal=FULL), engine("small"), tables=FALLBACK) as stack:
        # Here both have the same.
        response = await stack.http.post(
            "/v1/completions", json={"model": "big", "prompt": [65, 66], "max_tokens": 30}
        )
        assert response.json()["model"] == "small"


async def test_three_times_the_load_is_answered_by_both_and_every_request_has_one_entry(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.sqlite"
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{path}"}}}
    big = TakesOne(name="big", model="big", reply=engine("big").reply, step_s=0.01)
    small = engine("small")
    async with deployed(big, small, tables={**FALLBACK, **ledger}) as stack:
        asked = [answer(stack, model="big") for _ in range(12)]
        told = [model for model, _ in await asyncio.gather(*asked)]
        assert 0 < told.count("big") < 12
        assert told.count("small") == 12 - told.count("big")
    database = create_engine(f"sqlite:///{path}")
    with database.connect() as connection:
        rows = connection.execute(text("SELECT model, outcome FROM requests")).all()
    database.dispose()
    assert sorted(row.model for row in rows) == sorted(told)
    assert {row.outcome for row in rows} == {"stop"}
