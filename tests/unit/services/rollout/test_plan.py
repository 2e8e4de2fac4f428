"""rollout.toml: defaults that make sense, and mistakes that are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.errors import ConfigError
from services.rollout.plan import RolloutPlan, read_plan
from tests.deployment.containerfile import REPOSITORY


def read(folder: Path, text: str) -> RolloutPlan:
    path = folder / "rollout.toml"
    path.write_text(text)
    return read_plan(path)


def test_without_a_file_it_is_one_ten_fifty_and_all() -> None:
    plan = read_plan(None)
    assert [plan.share(step) for step in range(4)] == [0.01, 0.1, 0.5, 1.0]
    assert [step.proof for step in plan.steps] == [False, True, True]


def test_what_the_page_shows_are_the_defaults(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/rollout.md").read_text()
    (shown,) = [block for block in page.split("```toml\n")[1:] if block.startswith("advance")]
    text, _, _ = shown.partition("```")
    without_gate, _, _ = text.partition("[gate]")
    assert read(tmp_path, without_gate) == RolloutPlan()
    (tmp_path / "suite.toml").write_text("[task]\n")
    gate = read(tmp_path, text).gate
    assert gate is not None
    assert (gate.suite, gate.concurrency) == (str(tmp_path / "suite.toml"), 2)


def test_false_alarms_are_shared_by_what_is_judged() -> None:
    plan = RolloutPlan()
    assert plan.alarm == pytest.approx(plan.false_alarm / (4 * 3))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stepps = []", "rollout.toml.stepps: Object contains unknown field"),
        ("[[steps]]\nshare = 0.1\nrequest = 5", "rollout.toml.steps[0].request: Object contains unknown"),
        ("[live]\nerror = 0.1", "rollout.toml.live.error: Object contains unknown field"),
        ("[[steps]]\nshare = 1.5", "rollout.toml.steps[0].share: Expected `float` < 1"),
        ("[[steps]]\nshare = 0.5\n[[steps]]\nshare = 0.1", "each must be above the one before"),
        ("steps = []", "rollout.toml.steps: there are none"),
        ('advance = "sometimes"', "expected one of automatic, by hand"),
        ("dead_man_s = 1", "rollout.toml.dead_man_s: 1 is less than three looks of 1 s"),
        ('[gate]\nsuite = "away.toml"', "rollout.toml.gate.suite: there is no file"),
        ("[live", "not TOML"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert told in str(caught.value)


def test_a_suite_behind_a_link_keeps_its_name(tmp_path: Path) -> None:
    """As Kubernetes mounts a ConfigMap: the folder behind the link has another name in every pod."""
    (tmp_path / "..2026").mkdir()
    (tmp_path / "..2026/suite.toml").write_text("[task]\n")
    (tmp_path / "suite.toml").symlink_to("..2026/suite.toml")
    gate = read(tmp_path, '[gate]\nsuite = "suite.toml"').gate
    assert gate is not None
    assert gate.suite == str(tmp_path / "suite.toml")
