"""How often the gate is wrong, by simulation of whole releases: identical deployments, and broken ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from services.gate.cases import CHAT, Case, GateVerdict, LayerName, Pair, ServerAnswer
from services.gate.run import ROUND
from services.gate.scoring import Scorer
from services.gate.suite import read_suite
from services.gate.verdict import rule_of
from tests.unit.services.gate.toy import Spoiled, ToyModel

Differences = NDArray[np.float64]
SUITE = read_suite(None)
# What may be asked before a verdict, of releases.
MOST_ANSWERS = 300
POOL = 1500
NUM_TOKENS = 32


def _looked_at(layer: LayerName, differences: Differences, *, two_sided: bool = False) -> GateVerdict:
    """As the gate looks: after every round, until it is decided."""
    rule = rule_of(layer, SUITE, two_sided=two_sided)
    verdict = GateVerdict.NOT_ENOUGH
    for end in range(ROUND, len(differences) + 1, ROUND):
        verdict = rule.decide(differences[:end])
        if verdict is not GateVerdict.NOT_ENOUGH:
            break
    return verdict


def _releases(pool: Differences, runs: int, *, count: int = MOST_ANSWERS, seed: int = 0) -> list[Differences]:
    random = np.random.default_rng(seed)
    return [random.choice(pool, size=count, replace=False) for _ in range(runs)]


def _case(layer: LayerName, check: str) -> Case:
    return Case(id="x", layer=layer, question="x", path=CHAT, body={}, check=check)


def _scores(
    layer: LayerName, check: str, answers: Sequence[Sequence[ServerAnswer]], *, seeds_hold: bool = True
) -> Differences:
    scorer = Scorer(seeds_hold=seeds_hold)
    case = _case(layer, check)
    rows = zip(*answers, strict=True)
    pairs = (Pair(case=case, baseline=a, candidate=b, control=c) for a, b, c in rows)
    return np.array([scorer.score(pair).difference for pair in pairs])


@cache
def _answers(spoiled: Spoiled, run: int, *, seeds_from: int = 0) -> list[ServerAnswer]:
    prompts = [f"question {index}" for index in range(POOL)]
    seeds = range(seeds_from, seeds_from + POOL)
    return ToyModel(spoiled).answers(prompts, list(seeds), NUM_TOKENS, run)


def _token_differences(spoiled: Spoiled) -> Differences:
    return _scores("tokens", "tokens", (_answers(Spoiled(), 1), _answers(spoiled, 2), _answers(Spoiled(), 3)))


@cache
def _texts() -> tuple[tuple[int, ...], ...]:
    """What the sound model writes: texts on which perplexities differ."""
    return tuple(
        tuple(int(token.removeprefix(" w")) for token in answer.tokens) for answer in _answers(Spoiled(), 4)
    )


def _text_differences(spoiled: Spoiled) -> Differences:
    ours, theirs = (ToyModel(each).echoed(_texts(), run) for each, run in ((Spoiled(), 5), (spoiled, 6)))
    return _scores("intrinsic", "perplexity", (ours, theirs, ours))


BROKEN = {
    "4-bit weights, broken": Spoiled(weight_steps=2.0),
    "scale of keys and values": Spoiled(context_scale=0.7),
    "base of positions": Spoiled(position_drift=0.02),
    "template": Spoiled(template="<|user|>"),
    "temperature": Spoiled(temperature=1.1),
    "adapter": Spoiled(adapter=0.3),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_found_by_its_tokens(name: str) -> None:
    """In at least 99 of 100 releases, within 300 answers."""
    pool = _token_differences(BROKEN[name])
    verdicts = [_looked_at("tokens", each) for each in _releases(pool, 100)]
    assert verdicts.count(GateVerdict.WORSE) >= 99


@pytest.mark.parametrize("name", [name for name in BROKEN if name not in ("template", "temperature")])
def test_what_is_broken_is_found_by_its_perplexity(name: str) -> None:
    """But what is outside of the model."""
    verdicts = [_looked_at("intrinsic", each) for each in _releases(_text_differences(BROKEN[name]), 100)]
    assert verdicts.count(GateVerdict.WORSE) >= 99


def test_where_seeds_are_not_kept_a_temperature_is_found_by_how_probable_answers_are() -> None:
    """1.5 for 1.0, of 300 answers: one drawn answer says less than one compared under its seed."""
    sets = (Spoiled(), 0), (Spoiled(temperature=1.5), 10_000), (Spoiled(), 20_000)
    answers = [_answers(each, 7, seeds_from=begin) for each, begin in sets]
    pool = _scores("tokens", "tokens", answers, seeds_hold=False)
    verdicts = [_looked_at("tokens", each, two_sided=True) for each in _releases(pool, 100)]
    assert verdicts.count(GateVerdict.WORSE) >= 99


def _lost(random: np.random.Generator, count: int, share: float) -> Differences:
    """Both are right in the same nine of ten cases, but for chance in one of thirty; the candidate also fails
    in `share` of all.
    """
    right = random.random(count) < 0.9
    ours, theirs = (right ^ (random.random(count) < 1 / 30) for _ in range(2))
    return ours.astype(float) - (theirs & (random.random(count) >= share))


@pytest.mark.parametrize(
    ("layer", "share"),
    [
        # Two of five cases ask for schemas.
        ("structure", 0.4),
        # One of five depths.
        ("long_context", 0.2),
    ],
)
def test_schemas_ignored_and_needles_lost_are_found(layer: LayerName, share: float) -> None:
    releases = (_lost(np.random.default_rng(seed), MOST_ANSWERS, share) for seed in range(100))
    verdicts = [_looked_at(layer, each) for each in releases]
    assert verdicts.count(GateVerdict.WORSE) >= 99


def test_identical_deployments_are_called_worse_in_one_of_a_hundred_releases_at_most() -> None:
    """300 releases with all six layers, whose answers vary: batching changes tokens, and tasks are drawn."""
    pools = {
        "tokens": _scores(
            "tokens",
            "tokens",
            [
                ToyModel(noise=0.05).answers([f"q {i}" for i in range(POOL)], list(range(POOL)), 16, run)
                for run in range(3)
            ],
        ),
        "intrinsic": _scores(
            "intrinsic", "perplexity", [ToyModel(noise=0.3).echoed(_texts(), run) for run in (0, 1, 0)]
        ),
    }
    assert np.count_nonzero(pools["tokens"]) > POOL / 4, "the noise changes answers"
    alarms = 0
    for seed in range(300):
        random = np.random.default_rng(seed)
        for layer in SUITE.layers():
            if layer in pools:
                # Which of two equal deployments is the candidate is as good as drawn.
                some = random.choice(pools[layer], size=120) * random.choice([1.0, -1.0], size=120)
            else:
                # Right in seven of ten, each on its own: as far apart as equal servers can be.
                ours, theirs = (random.random(120) < 0.7 for _ in range(2))
                some = ours.astype(float) - theirs
            if _looked_at(layer, some) is GateVerdict.WORSE:
                alarms += 1
                break
    assert alarms <= 3


def test_equal_deployments_end_with_a_verdict() -> None:
    """Where greedy answers are equal, the default suite has cases enough."""
    for layer in SUITE.layers():
        assert _looked_at(layer, np.zeros(120 if layer != "intrinsic" else 60)) is GateVerdict.NOT_WORSE
    assert _looked_at("tokens", _token_differences(Spoiled())[:120]) is GateVerdict.NOT_WORSE
