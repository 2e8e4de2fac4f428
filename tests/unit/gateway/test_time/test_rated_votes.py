"""Votes of self-consistency that a served model weighs."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.test_time.strategies import Concluded, Rated, RatedVotes, replay
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.pooling import PoolingEngine
from tests.unit.gateway.test_time.test_strategies import after, ended
from tests.unit.gateway.test_time.test_stream import CHAT, WITH_JUDGE, TwoModels, ask, said, saying, settled

SCORER = {"type": "number", "model": "judge"}


def test_several_that_agree_outweigh_the_one_that_scores_best() -> None:
    votes = [ended(0, "5"), ended(1, "7"), ended(2), ended(3, "7")]
    scores = Rated(scores={0: 0.9, 1: 0.5, 3: 0.6})
    steps = replay(RatedVotes(4), [*votes, scores])
    assert [each.start for each in steps] == [4, 0, 0, 0, 0, 0]
    assert steps[4].rate == (0, 1, 3)
    assert (steps[-1].winner, steps[-1].ended_by) == (3, "all_samples")


def test_what_scores_nothing_has_no_weight() -> None:
    votes = [ended(0, "5"), ended(1, "7"), ended(2, "7")]
    assert after(RatedVotes(3), *votes, Rated(scores={0: 0.3, 1: 0.1, 2: -5.0})).winner == 0


def test_votes_count_alike_where_time_ends_before_they_are_rated() -> None:
    votes = [ended(0, "5"), ended(1, "7"), ended(2, "7")]
    assert after(RatedVotes(4), *votes, Concluded(ended_by="deadline")).winner == 1
    assert after(RatedVotes(2), ended(0), ended(1, logprob=-0.1)).winner == 1


@pytest.mark.asyncio
async def test_a_served_model_weighs_votes_in_one_request() -> None:
    engine = ScriptedEngine(reply=saying("it is 4", "so it is 5", "4"))
    judge = PoolingEngine(model="judge", name="engine-1")
    tokenizer = TwoModels(tasks=["score"], num_dimensions=1)
    async with deployed(engine, judge, tokenizer=tokenizer, tables=WITH_JUDGE) as stack:
        answer = await ask(stack, strategy="self_consistency", samples=3, scorer=SCORER)
        text, usage = said(CHAT, answer)
        await settled(stack)
    told = usage["test_time"]
    scores = [each["score"] for each in told["samples"]]
    assert told["votes"] == pytest.approx({"4": scores[0] + scores[2], "5": scores[1]})
    assert text == ("it is 4" if scores[0] + scores[2] >= scores[1] else "so it is 5")
    assert [submit.pooling.task for submit in judge.submissions] == ["score"]
    assert told["ended_by"] == "all_samples"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"strategy": "self_consistency", "scorer": SCORER, "confidence": 0.9}, "test_time.confidence"),
        ({"strategy": "deepconf", "scorer": SCORER}, "test_time.scorer.model"),
        ({"strategy": "best_of", "scorer": SCORER}, "test_time.scorer.model"),
        ({"strategy": "self_consistency", "scorer": {**SCORER, "model": "tiny"}}, "test_time.scorer"),
        ({"strategy": "self_consistency", "scorer": {**SCORER, "model": "nobody"}}, "test_time.scorer"),
    ],
)
async def test_who_weighs_what_else_is_refused(asked: dict[str, Any], field: str) -> None:
    engine, judge = ScriptedEngine(reply=saying("4")), PoolingEngine(model="judge", name="engine-1")
    tokenizer = TwoModels(tasks=["score"], num_dimensions=1)
    async with deployed(engine, judge, tokenizer=tokenizer, tables=WITH_JUDGE) as stack:
        error = (await ask(stack, **asked)).json()["error"]
        assert error["param"] == field
        assert not engine.submissions
