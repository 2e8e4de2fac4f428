"""Rollouts and decisions in SQLite, and in a real PostgreSQL where one is installed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from gateway.models.route_store import open_route_store, read_weights
from runtime.errors import ConfigError
from services.gate.cases import GateVerdict
from services.rollout.decision import RolloutAction, RolloutDecision, Why
from services.rollout.evidence import Evidence
from services.rollout.figures import Sides, Tally
from services.rollout.plan import RolloutPlan
from services.rollout.store import (
    RolloutMoved,
    RolloutProgress,
    RolloutState,
    RolloutStore,
    StoredRollout,
    weights_of,
)
from tests.unit.gateway.ledger.conftest import postgres_url

__all__ = ["postgres_url"]

SIDES = Sides("chat", "chat@2", ("chat@1", "chat@0"))
CONFIGURED = {"chat@1": 60.0, "chat@0": 20.0, "chat@2": 0.0}
GOOD = RolloutDecision(
    action=RolloutAction.ADVANCE,
    why=Why.GOOD,
    reason="not worse: errors",
    evidence=(
        Evidence(
            figure="errors",
            verdict=GateVerdict.NOT_WORSE,
            delta=0.01,
            baseline=0.0,
            candidate=0.0,
            num_baseline=900,
            num_candidate=800,
            difference=0.0,
            lower=-0.02,
            upper=0.009,
        ),
    ),
)
BAD = RolloutDecision(action=RolloutAction.TAKE_BACK, why=Why.WORSE, reason="errors: all")


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'ledger.sqlite'}"
        return
    found = str(request.getfixturevalue("postgres_url"))
    yield found
    engine = create_engine(found)
    with engine.begin() as connection:
        for table in ("route_weights", "rollouts", "rollout_decisions"):
            connection.execute(text(f"DROP TABLE {table}"))
    engine.dispose()


@pytest.fixture
def store(url: str) -> Iterator[RolloutStore]:
    store = RolloutStore(url)
    yield store
    store.close()


def begun(store: RolloutStore, plan: RolloutPlan | None = None) -> StoredRollout:
    return store.begin(SIDES, CONFIGURED, plan or RolloutPlan(), "ada", "ada:1")


def in_force(url: str) -> dict[str, float]:
    engine = open_route_store(url)
    with engine.connect() as connection:
        (found,) = read_weights(connection)
    engine.dispose()
    assert found.configured == CONFIGURED
    return found.weights


def test_others_keep_their_shares_among_them() -> None:
    assert weights_of(CONFIGURED, "chat@2", 0.5) == {"chat@1": 37.5, "chat@0": 12.5, "chat@2": 50.0}
    assert weights_of(CONFIGURED, "chat@2", 1.0) == {"chat@1": 0.0, "chat@0": 0.0, "chat@2": 100.0}


def test_each_decision_sets_the_weights_and_stands_in_the_table(store: RolloutStore, url: str) -> None:
    rollout = begun(store)
    shares = [in_force(url)["chat@2"]]
    while rollout.state is RolloutState.RUNNING:
        rollout = store.decide(rollout, GOOD, "ada:1")
        shares.append(in_force(url)["chat@2"])
    assert shares == pytest.approx([1.0, 10.0, 50.0, 100.0])
    assert rollout.state is RolloutState.DONE
    found = store.decisions("chat")
    assert [each.action for each in found] == ["begin", "advance", "advance", "advance"]
    assert [(each.share_before, each.share_after) for each in found] == [
        (0.0, 0.01),
        (0.01, 0.1),
        (0.1, 0.5),
        (0.5, 1.0),
    ]
    assert [each.who for each in found] == ["ada", "ada:1", "ada:1", "ada:1"]
    assert found[-1].evidence == GOOD.evidence
    assert store.decisions("other") == []


def test_what_is_taken_back_has_nothing(store: RolloutStore, url: str) -> None:
    rollout = store.decide(begun(store), GOOD, "ada:1")
    rollout = store.decide(rollout, BAD, "ada:1")
    assert (rollout.state, rollout.share) == (RolloutState.TAKEN_BACK, 0.0)
    assert in_force(url) == {"chat@1": 75.0, "chat@0": 25.0, "chat@2": 0.0}
    # Another one may begin.
    assert begun(store).id != rollout.id


def test_an_alias_has_one_rollout_at_a_time(store: RolloutStore, url: str) -> None:
    def try_it(number: int) -> bool:
        try:
            store.begin(SIDES, CONFIGURED, RolloutPlan(), "ada", f"ada:{number}")
        except ConfigError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(try_it, range(4))).count(True) == 1
    with pytest.raises(ConfigError, match="'chat' has a rollout that runs already"):
        begun(store)
    # Those that lost have written no decision.
    assert len(store.decisions()) == 1


def test_of_two_who_decide_at_once_one_does(store: RolloutStore, url: str) -> None:
    seen = begun(store)

    def try_it(decision: RolloutDecision) -> bool:
        try:
            store.decide(seen, decision, "both")
        except RolloutMoved:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(try_it, [GOOD, BAD])) == [False, True]
    assert len(store.decisions()) == 2
    with pytest.raises(RolloutMoved):
        store.beat(seen, RolloutProgress())
    latest = store.latest("chat")
    assert latest is not None
    assert in_force(url)["chat@2"] == pytest.approx(100 * latest.share)


def test_what_was_counted_survives_its_watcher_and_not_its_step(store: RolloutStore) -> None:
    progress = RolloutProgress(tally=Tally(counts={"candidate.errors.all": 7.0}), gate="not worse")
    rollout = store.beat(begun(store), progress)
    found = store.latest("chat")
    assert found is not None
    assert found.progress == progress
    claimed = store.claim(found, "grace:2")
    assert (claimed.watcher, claimed.progress) == ("grace:2", progress)
    # The one before finds out as soon as it writes.
    with pytest.raises(RolloutMoved):
        store.beat(rollout, progress)
    after = store.decide(claimed, GOOD, "grace:2").progress
    assert (after.tally.counts, after.gate) == ({}, "not worse")
