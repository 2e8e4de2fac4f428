"""Requests with options of every kind are answered with drafts as without, bit by bit: a few of those of
`benchmarks.drafters_same`, whose 2,000 the record holds.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from benchmarks.drafters import prompts_of
from benchmarks.drafters_same import DraftedAnswers, answered, different, gone_after, mixed_requests
from engine.types import Request, SamplingParams
from services.supervisor.config import BUNDLED_MODEL

SEED, VOCABULARY = 5, 2048


@pytest.fixture(scope="module")
def requests() -> Sequence[Request]:
    prompts = [each for each in prompts_of(BUNDLED_MODEL, 24, "any") if len(each) < 200]
    return mixed_requests(prompts, 60, SEED, VOCABULARY)


@pytest.fixture(scope="module")
def plain(requests: Sequence[Request]) -> DraftedAnswers:
    return answered(requests, "off", SEED)


@pytest.mark.parametrize("method", ["suffix", "eagle3 tree", "medusa"])
def test_mixed_requests_are_answered_as_without_drafts(
    method: str, requests: Sequence[Request], plain: DraftedAnswers
) -> None:
    found = answered(requests, method, SEED)
    assert different(found, plain, requests, SEED) == []
    assert found.num_drafted > found.num_accepted > 100
    assert found.num_preempted > 0
    assert plain.num_drafted < found.num_drafted // 4


def test_the_mix_has_options_of_every_kind(requests: Sequence[Request]) -> None:
    many = [*requests, *mixed_requests([each.prompt_token_ids for each in requests], 400, SEED, VOCABULARY)]
    for name in ("grammar", "retention", "adapter", "priority", "cache_salt"):
        assert any(getattr(each, name) for each in many), name
    neutral = SamplingParams()
    for name in set(SamplingParams.__struct_fields__) - {
        "allowed_token_ids",
        "ignore_eos",
        "max_thinking_tokens",
    }:
        assert any(getattr(each.sampling, name) != getattr(neutral, name) for each in many), name
    assert any(gone_after(each, SEED) for each in requests)


def test_what_differs_is_found(requests: Sequence[Request], plain: DraftedAnswers) -> None:
    key = next(
        key
        for key, each in plain.answers.items()
        if len(each.tokens) > 3 and not gone_after(requests[key[0]], SEED)
    )
    other = answered(requests[: key[0] + 1], "off", SEED)
    other.answers = plain.answers | {key: other.answers[key]}
    assert different(other, plain, requests, SEED) == []
    other.answers[key].tokens[-1] += 1
    assert [each.split(",")[0] for each in different(other, plain, requests, SEED)] == [str(key[0])]
