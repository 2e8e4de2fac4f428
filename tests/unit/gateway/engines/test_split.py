"""Prompts that one engine computes and another answers: when that pays, and what becomes of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.engines import split
from gateway.engines.router import pays
from observability.emit import hand_overs
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode

STORY = "one engine reads and another one writes"
TABLES = {"gateway": {"routing": {"split_tokens": 1}}}


def story(submit: Any, choice: int) -> list[int]:
    return [*encode(f"{submit.sampling.seed} {STORY}"), END_ID]


def prefill(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(**{"name": "prefill", "reply": story, "role": "prefill", **fields})


def decode(**fields: Any) -> ScriptedEngine:
    return ScriptedEngine(name="decode", reply=story, role="decode", **fields)


async def until(engine: ScriptedEngine, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            engine.changed.clear()
            await engine.changed.wait()


def is_counted(stack: Deployment, outcome: str) -> bool:
    page = stack.metrics.expose()[0].decode()
    return f'{hand_overs.SPLITS.name}{{outcome="{outcome}"}} 1.0' in page


async def test_the_answer_goes_on_where_the_prompt_was_not_computed() -> None:
    first, second = prefill(), decode()
    async with deployed(first, second, tables=TABLES) as stack:
        body = (await stack.chat(seed=7, logprobs=True)).json()
        assert body["choices"][0]["message"]["content"] == f"7 {STORY}"
        assert body["choices"][0]["finish_reason"] == "stop"
        # One bill: the prompt once, each token once.
        assert body["usage"]["completion_tokens"] == len(f"7 {STORY}") + 1
        assert body["usage"]["prompt_tokens"] == len(first.submissions[0].prompt_token_ids)
        assert len(body["choices"][0]["logprobs"]["content"]) == body["usage"]["completion_tokens"]
        (asked,), (answered,) = first.submissions, second.submissions
        assert answered.output_token_ids == encode("7")
        assert answered.source.ticket == asked.hand_over
        assert len(asked.hand_over) == 16
        assert (asked.entry_id, answered.prompt_token_ids) == ("", asked.prompt_token_ids)
        assert answered.source.address in {each.target for each in stack.gateway.fleet.attachments}
        await until(first, lambda: first.released == [asked.hand_over])
        assert is_counted(stack, "handed_over")


@pytest.mark.parametrize(
    "asked",
    [{"n": 2}, {"max_tokens": 1}, {"kv": {"policy": "window+sinks", "window_tokens": 64}}],
)
async def test_what_cannot_be_handed_over_is_answered_by_one(asked: dict[str, Any]) -> None:
    first, second = prefill(), decode()
    async with deployed(first, second, tables=TABLES) as stack:
        assert (await stack.chat(seed=7, **asked)).status_code == 200
        assert first.submissions == []
        assert len(second.submissions) == 1


async def test_short_prompts_and_lone_engines_are_not_split() -> None:
    first, second = prefill(), decode()
    async with deployed(first, second) as stack:
        await stack.chat(seed=7)
        assert first.submissions == []
    alone = prefill()
    async with deployed(alone, tables=TABLES) as stack:
        body = (await stack.chat(seed=7)).json()
        assert body["choices"][0]["message"]["content"] == f"7 {STORY}"
        assert not alone.submissions[0].hand_over


async def test_an_end_at_the_first_token_is_the_end() -> None:
    first, second = prefill(reply=lambda submit, choice: [END_ID]), decode()
    async with deployed(first, second, tables=TABLES) as stack:
        assert (await stack.chat(seed=7)).json()["choices"][0]["finish_reason"] == "stop"
        assert second.submissions == []
        assert is_counted(stack, "ended")


@pytest.mark.parametrize("why", ["lost", "refused", "late"])
async def test_whatever_goes_wrong_with_the_first_another_one_answers(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = prefill(dies_after_tokens=0 if why == "lost" else -1), decode()
    if why == "refused":
        first.refusal = MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "too long a queue")
    if why == "late":
        monkeypatch.setattr(split, "_LEAST_S", 0.01)
        first.gate.clear()
    async with deployed(first, second, tables=TABLES) as stack:
        body = (await stack.chat(seed=7)).json()
        assert body["choices"][0]["message"]["content"] == f"7 {STORY}"
        assert body["usage"]["completion_tokens"] == len(f"7 {STORY}") + 1
        (answered,) = second.submissions
        assert not answered.output_token_ids
        assert not answered.HasField("source")
        assert is_counted(stack, why)
        if why == "late":
            await until(first, lambda: bool(first.cancels and first.released))


async def test_a_client_that_leaves_has_what_is_held_released() -> None:
    first, second = prefill(), decode()
    second.gate.clear()
    async with deployed(first, second, tables=TABLES) as stack:
        asking = asyncio.create_task(stack.chat(seed=7))
        while not second.submissions:
            await asyncio.sleep(0.001)
        asking.cancel()
        await until(first, lambda: bool(first.released))
        await until(second, lambda: bool(second.cancels))


@pytest.mark.parametrize(
    ("first_s", "moves_s", "alone_s", "num_running", "expected"),
    [
        # Equal engines that nobody else asks: moving is only a loss.
        (1.0, 0.1, 1.0, 0, False),
        # The answers of others are spared.
        (1.0, 0.1, 1.0, 4, True),
        (2.0, 0.1, 1.0, 4, False),
        # The other one has nothing to do.
        (1.0, 0.1, 3.0, 0, True),
        # Nothing was measured.
        (0.0, 0.0, 0.0, 0, True),
    ],
)
def test_it_is_split_where_that_pays(
    first_s: float, moves_s: float, alone_s: float, num_running: int, expected: bool
) -> None:
    assert pays(first_s, moves_s, alone_s, num_running=num_running) is expected
