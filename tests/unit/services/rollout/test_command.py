"""`millrace rollout` as people and Jobs start it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.rollout.__main__ import main
from services.rollout.decision import RolloutAction, RolloutDecision, Why
from services.rollout.figures import Sides
from services.rollout.plan import RolloutPlan
from services.rollout.store import RolloutStore

SIDES = Sides("chat", "chat@2", ("chat@1",))


class Commands:
    """A deployment's file and database."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file, self.url = folder / "millrace.toml", f"sqlite:///{folder / 'ledger.sqlite'}"
        self._capsys = capsys
        self.configure('{"chat@1" = 100, "chat@2" = 0}')
        self.store = RolloutStore(self.url)

    def configure(self, chat: str) -> None:
        self.file.write_text(
            f'[security]\ncontext_secret = "a secret for unit tests"\n[gateway.ledger]\nurl = "{self.url}"\n'
            '[models."chat@1"]\npath = "a"\n[models."chat@2"]\npath = "b"\n[models."chat@3"]\npath = "c"\n'
            f"[routes]\nchat = {chat}\n"
        )

    def begin(self, plan: RolloutPlan | None = None, watcher: str = "ada:1") -> None:
        self.store.begin(SIDES, {"chat@1": 100.0, "chat@2": 0.0}, plan or RolloutPlan(), "ada", watcher)

    def end(self, action: RolloutAction) -> None:
        rollout = self.store.latest("chat")
        assert rollout is not None
        while rollout.state == "running":
            decision = RolloutDecision(action=action, why=Why.BY_HAND, reason="")
            rollout = self.store.decide(rollout, decision, "ada")

    def __call__(self, *arguments: str) -> tuple[int, str]:
        """Exit status, and what was printed."""
        status = main(["--config", str(self.file), *arguments])
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err


@pytest.fixture
def rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    commands = Commands(tmp_path, capsys)
    yield commands
    commands.store.close()


# Nobody is there: what is refused is refused before.
RUN = ("--target", "gateway=127.0.0.1:9", "run")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("run", "chat", "chat@2"), "no gateway is named"),
        ((*RUN, "talk", "chat@2"), "[routes] has no alias 'talk'; known: chat"),
        ((*RUN, "chat", "chat@3"), "routes.chat: it does not name 'chat@3'"),
        ((*RUN, "chat", "chat@1"), "routes.chat: no other model has a weight"),
        (("advance", "chat"), "alias 'chat' has no rollout that runs"),
        (("abort", "talk"), "alias 'talk' has no rollout that runs"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_two(
    rollout: Commands, arguments: tuple[str, ...], told: str
) -> None:
    status, printed = rollout(*arguments)
    assert status == 2
    assert told in printed
    assert len(printed.splitlines()) == 1


def test_people_advance_and_take_back_whoever_watches(rollout: Commands) -> None:
    rollout.begin()
    assert rollout("advance", "chat", "--reason", "looks fine")[0] == 0
    status, printed = rollout("abort", "chat", "--reason", "a complaint")
    assert (status, "chat@2 has 0 of chat" in printed) == (0, True)
    status, printed = rollout("history", "chat", "--json")
    found = json.loads(printed)
    assert [(each["action"], each["share_after"]) for each in found] == [
        ("begin", 0.01),
        ("advance", 0.1),
        ("take back", 0.0),
    ]
    assert found[-1]["reason"] == "a complaint"
    assert "@" in found[-1]["who"]
    assert "looks fine" in rollout("history")[1]


def test_status_shows_where_each_is(rollout: Commands) -> None:
    assert rollout("status") == (0, "there has been no rollout\n")
    rollout.begin()
    (found,) = json.loads(rollout("status", "--json")[1])
    assert (found["candidate"], found["state"], found["share"], found["step"]) == (
        "chat@2",
        "running",
        0.01,
        0,
    )
    assert "1 of 3" in rollout("status", "chat")[1]
    assert json.loads(rollout("status", "talk", "--json")[1]) == []


def test_another_candidate_or_plan_is_refused_while_one_runs(rollout: Commands, tmp_path: Path) -> None:
    rollout.configure('{"chat@1" = 100, "chat@2" = 0, "chat@3" = 0}')
    rollout.begin()
    assert "a rollout of 'chat@2' that runs; end it first" in rollout(*RUN, "chat", "chat@3")[1]
    (tmp_path / "rollout.toml").write_text("false_alarm = 0.05")
    told = rollout(*RUN, "chat", "chat@2", "--plan", str(tmp_path / "rollout.toml"))[1]
    assert "was begun with another plan" in told


def test_an_end_that_is_not_in_the_file_is_not_undone(rollout: Commands) -> None:
    rollout.begin()
    rollout.end(RolloutAction.ADVANCE)
    status, printed = rollout(*RUN, "chat", "chat@2")
    assert status == 2
    assert 'write chat = {"chat@1" = 0, "chat@2" = 100} there first' in printed


def test_without_a_shared_database_there_is_none(rollout: Commands) -> None:
    rollout.url = ""
    rollout.configure('{"chat@1" = 100, "chat@2" = 0}')
    assert "gateway.rollout.url: neither it nor gateway.ledger.url" in rollout("status")[1]


@pytest.mark.parametrize(
    ("suite", "url", "told"),
    [
        ("[task]\nfiles = 3\n", "http://127.0.0.1:9", "suite.toml: Object contains unknown field `files`"),
        ('[task]\nfile = "tasks.jsonl"\n', "http://127.0.0.1:9", "tasks.jsonl:1: "),
        ("[task]\n", "", "[gate] asks a server, and '' is none; name it by --url"),
        ("[task]\n", "ftp://here", "[gate] asks a server, and 'ftp://here' is none"),
    ],
)
def test_a_suite_that_could_not_be_run_is_refused_before_anything_moves(
    rollout: Commands, tmp_path: Path, suite: str, url: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_URL", raising=False)
    (tmp_path / "suite.toml").write_text(suite)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "What?", "check": "exact"}\n')
    (tmp_path / "rollout.toml").write_text('[gate]\nsuite = "suite.toml"\n')
    more = ("--url", url) if url else ()
    status, printed = rollout(*more, *RUN, "chat", "chat@2", "--plan", str(tmp_path / "rollout.toml"))
    assert (status, len(printed.splitlines())) == (2, 1)
    assert told in printed
    assert rollout("status")[1] == "there has been no rollout\n"
