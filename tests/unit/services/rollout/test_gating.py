"""The gate's suite in a rollout: both versions of one server answer it, and its verdict is the gate's."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gate import client
from services.gate.cases import GateVerdict
from services.rollout.figures import Sides
from services.rollout.gating import run_suite
from services.rollout.plan import read_plan
from services.rollout.store import RolloutStore, StoredRollout
from tests.unit.services.gate.toy import Spoiled, ToyServer, TwoVersions, serving

KEY = "mr-of-the-suite"


@pytest.fixture
def rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoredRollout:
    monkeypatch.setattr(client, "_PAUSE_S", 0.0)
    (tmp_path / "suite.toml").write_text("[tokens]\n[structure]\n")
    (tmp_path / "rollout.toml").write_text('[gate]\nsuite = "suite.toml"\n')
    store = RolloutStore(f"sqlite:///{tmp_path / 'ledger.sqlite'}")
    configured = {"chat@0": 1.0, "chat@1": 99.0, "chat@2": 0.0}
    sides = Sides("chat", "chat@2", ("chat@0", "chat@1"))
    begun = store.begin(sides, configured, read_plan(tmp_path / "rollout.toml"), "ada", "ada:1")
    store.close()
    return begun


async def test_a_version_that_answers_as_well_is_not_worse(rollout: StoredRollout, tmp_path: Path) -> None:
    with serving(TwoVersions()) as server:
        verdict, told = await run_suite(rollout, server.url, KEY, tmp_path)
    assert verdict is GateVerdict.NOT_WORSE, told
    assert told.startswith("not worse: tokens not worse")
    assert server.keys == {f"Bearer {KEY}"}
    # The heaviest of the others is what it is compared with.
    assert {body.get("model") for body in server.asked} <= {"chat@1"}


async def test_a_version_with_another_adapter_is_worse(rollout: StoredRollout, tmp_path: Path) -> None:
    with serving(TwoVersions(second=ToyServer(Spoiled(adapter=1.0)))) as server:
        verdict, told = await run_suite(rollout, server.url, KEY, tmp_path)
    assert verdict is GateVerdict.WORSE
    assert "tokens worse" in told


async def test_a_server_that_is_lost_is_no_verdict(rollout: StoredRollout, tmp_path: Path) -> None:
    with serving(TwoVersions(dies_after=30)) as server:
        verdict, told = await run_suite(rollout, server.url, KEY, tmp_path)
    assert verdict is GateVerdict.NOT_ENOUGH
    assert "does not answer" in told


async def test_a_server_without_the_candidate_is_no_verdict(rollout: StoredRollout, tmp_path: Path) -> None:
    with serving(ToyServer()) as server:
        verdict, told = await run_suite(rollout, server.url, KEY, tmp_path)
    assert verdict is GateVerdict.NOT_ENOUGH
    assert "has no model 'chat@" in told
