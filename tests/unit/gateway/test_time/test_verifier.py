"""A model that is asked whether answers are right, through a whole gateway."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from millrace.engine.v1 import engine_pb2

from contract.outputs import TokenLogprobs
from gateway.test_time.verifier import likelihood
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode
from tests.unit.gateway.test_time.test_stream import (
    BODIES,
    CHAT,
    PROMPT,
    TIER,
    ask,
    in_ledger,
    said,
    saying,
    settled,
)

TWO: dict[str, Any] = {**TIER, "served": {"models": {"tiny": {"path": "t"}, "judge": {"path": "j"}}}}
VERIFIER = {"type": "verifier", "model": "judge"}


def judging(verdicts: dict[str, str]) -> ScriptedEngine:
    """A judge that says this of answers that contain a text."""

    def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
        prompt = bytes(submit.prompt_token_ids).decode()
        _, _, answer = prompt.partition("Proposed answer:")
        return [*encode(next(verdict for text, verdict in verdicts.items() if text in answer)), END_ID]

    return ScriptedEngine(name="engine-1", model="judge", reply=reply)


@pytest.mark.parametrize(
    ("scorer", "verdicts", "scores"),
    [
        ({}, {"six": "No", "seven": "Yes", "eight": "No"}, [0, 1, 0]),
        (
            {"minimum": 0, "maximum": 10},
            {"six": "4", "seven": "I give it 9.", "eight": "0"},
            [0.4, 0.9, 0],
        ),
    ],
)
async def test_the_answer_that_the_verifier_likes_best_is_given(
    scorer: dict[str, Any], verdicts: dict[str, str], scores: list[float], tmp_path: Path
) -> None:
    ledger = {"gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}}}
    judge, engine = judging(verdicts), ScriptedEngine(reply=saying("six", "seven", "eight"))
    async with deployed(engine, judge, tables={**TWO, **ledger}) as stack:
        asked = {"strategy": "best_of", "samples": 3, "scorer": {**VERIFIER, **scorer}}
        text, usage = said(CHAT, await ask(stack, **asked))
        await settled(stack)
    assert text == "seven"
    told = usage["test_time"]
    assert [each["score"] for each in told["samples"]] == pytest.approx(scores)
    prompts = [bytes(submit.prompt_token_ids).decode() for submit in judge.submissions]
    assert len(prompts) == 3
    assert all("Question:\nhi\n" in prompt for prompt in prompts)
    assert {submit.sampling.temperature for submit in judge.submissions} == {0.0}
    # Yes and no are led by a grammar, and a grade is not.
    assert {submit.HasField("grammar") for submit in judge.submissions} == {not scorer}
    generated = sum(len(encode(verdict)) + 1 for verdict in verdicts.values())
    assert told["scorer_tokens"] == sum(map(len, prompts)) + generated
    rows = in_ledger(tmp_path)
    assert sorted(row[0] for row in rows) == ["judge", "judge", "judge", "tiny"]
    assert usage["prompt_tokens"] == PROMPT


async def test_a_verifier_may_judge_whether_a_larger_model_is_asked() -> None:
    models = {**TWO["served"]["models"], "big": {"path": "b"}}
    tables = {**TIER, "served": {"models": models}}
    engines = [
        ScriptedEngine(reply=saying("six")),
        judging({"six": "No"}),
        ScriptedEngine(name="engine-2", model="big", reply=saying("seven")),
    ]
    async with deployed(*engines, tables=tables) as stack:
        text, _ = said(CHAT, await ask(stack, strategy="escalate", model="big", scorer=VERIFIER))
    assert text == "seven"


@pytest.mark.parametrize("on_failure", ["refuse", "answer"])
@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        ({"minimum": 0, "maximum": 10}, "no number between 0 and 10: 'well'"),
        ({"minimum": 0, "maximum": 10, "model": "nobody"}, "'nobody' is not served here"),
        ({}, "neither yes nor no: 'well'"),
    ],
)
async def test_a_verifier_without_a_verdict_is_told_as_the_request_says(
    scorer: dict[str, Any], problem: str, on_failure: str
) -> None:
    judge, engine = judging({"": "well"}), ScriptedEngine(reply=saying("it"))
    async with deployed(engine, judge, tables=TWO) as stack:
        asked = {"strategy": "best_of", "samples": 2, "scorer": {**VERIFIER, **scorer}}
        answer = await ask(stack, **asked, on_failure=on_failure)
        await settled(stack)
    if on_failure == "refuse":
        error = answer.json()["error"]
        assert error["param"] == "test_time.scorer"
        assert problem in error["message"]
    else:
        text, usage = said(CHAT, answer)
        assert text == "it"
        assert problem in usage["test_time"]["failure"]


@pytest.mark.parametrize(
    ("scorer", "field"),
    [
        ({"type": "verifier"}, "test_time.scorer.model"),
        ({**VERIFIER, "minimum": 0}, "test_time.scorer.maximum"),
        ({**VERIFIER, "maximum": 1}, "test_time.scorer.minimum"),
        ({**VERIFIER, "minimum": 1, "maximum": 1}, "test_time.scorer.maximum"),
        ({**VERIFIER, "pattern": "a"}, "test_time.scorer.pattern"),
    ],
)
async def test_what_is_wrong_in_itself_is_refused_by_name(scorer: dict[str, Any], field: str) -> None:
    async with deployed(tables=TIER) as stack:
        test_time = {"strategy": "best_of", "scorer": scorer}
        refused = await stack.http.post(CHAT, json={**BODIES[CHAT], "test_time": test_time})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, field), refused.text


TEXTS = ["Yes", " yes", "Y", "No", " N", "Nobody", "", "Maybe"]


def tokens(chances: dict[str, float]) -> tuple[TokenLogprobs, Callable[[int], str]]:
    ids = tuple(TEXTS.index(text) for text in chances)
    logprobs = tuple(math.log(chance) for chance in chances.values())
    return TokenLogprobs(ids[0], logprobs[0], ids, logprobs), TEXTS.__getitem__


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ({"Yes": 0.6, "No": 0.2}, 0.75),
        ({"No": 0.5, "Yes": 0.1, " yes": 0.2, "Y": 0.1, " N": 0.1}, 0.4),
        ({"Yes": 0.3, "Nobody": 0.6, "": 0.1}, 1.0),
        ({"Maybe": 0.9, "": 0.1}, None),
    ],
)
def test_the_score_is_the_share_of_yes(chances: dict[str, float], expected: float | None) -> None:
    found = likelihood(*tokens(chances))
    assert found == (None if expected is None else pytest.approx(expected))
