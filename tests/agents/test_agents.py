"""Agents end a task of ten calls, undisturbed and while what serves them is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from tests.agents.agents import AGENTS, FILES, FINAL, PATHS, Agent
from tests.agents.scripted import Script, walks
from tests.agents.stack import scripted_stack
from tests.clients.environments import Client, Environments, read_pins
from tests.e2e.stack import Stack, eventually

pytestmark = pytest.mark.agents

_ENVIRONMENTS = Path(os.environ.get("AGENTS_FOLDER", "build/agents")).resolve()
# A service, and the file that the task has made when it is killed: calls enough come after each.
_KILLS = (("engine-0", "mill.py"), ("tokenizer", "out.txt"), ("gateway-0", "notes.md"))
# How often each agent does its task, of which the record has many.
_RUNS = int(os.environ.get("AGENTS_RUNS", "1"))


@pytest.fixture(scope="module", params=AGENTS, ids=lambda agent: agent.name)
def agent(request: pytest.FixtureRequest) -> Agent:
    return request.param


@pytest.fixture(scope="module")
def packages(agent: Agent) -> Path:
    client = Client(name=agent.name, group="Agents", program="", npm=agent.npm)
    environments = Environments(_ENVIRONMENTS, read_pins(), ())
    environments.make(client)
    return environments.folder(client) / "node_modules"


def _task(agent: Agent, packages: Path, folder: Path, *, kills: bool) -> None:
    work = folder / "work"
    work.mkdir(parents=True)
    script = agent.script(work)
    with scripted_stack(folder / "stack", script, num_engines=2) as stack:
        done = threading.Event()
        killed: list[str] = []
        killer = threading.Thread(target=_kill_each, args=(stack, work, done, killed))
        if kills:
            killer.start()
        try:
            run = agent.run(packages, stack, work, folder / "home")
        finally:
            done.set()
            if kills:
                killer.join()
        assert (run.files, run.status) == (FILES, 0), run.said + stack.transcript()
        assert FINAL in run.said
        assert killed == [name for name, _ in _KILLS if kills], run.said + stack.transcript()
        # Envoy writes its log after a while.
        assert eventually(lambda: bool(_methods(folder))), stack.transcript()
        assert _methods(folder) == {agent.method}
        _assert_led(folder, script)
        stack.assert_nothing_leaked()


def _assert_led(folder: Path, script: Script) -> None:
    """Every reply followed the grammar of the agent's own tools, each call among them."""
    led = walks(folder / "stack" / "script.json")
    assert not [each.problem for each in led if each.problem]
    said = [each.said for each in led]
    assert all(any(one.endswith(step) for one in said) for step in script.steps), said


def _methods(folder: Path) -> set[str]:
    """Of the requests with which an agent's turns came, or began."""
    (log,) = (folder / "stack").rglob("access.log")
    asked = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {each["method"] for each in asked if each["path"].partition("?")[0] in PATHS} - {"HEAD"}


def _kill_each(stack: Stack, work: Path, done: threading.Event, killed: list[str]) -> None:
    """Each service once, when the task has come so far; `killed` gets their names."""
    for name, file in _KILLS:
        eventually(lambda file=file: done.is_set() or (work / file).exists(), 240.0)
        if done.is_set():
            return
        os.kill(stack.pid(name), signal.SIGKILL)
        killed.append(name)


@pytest.mark.parametrize("number", range(_RUNS))
def test_a_task_of_ten_calls(agent: Agent, packages: Path, tmp_path: Path, number: int) -> None:
    _task(agent, packages, tmp_path, kills=False)


@pytest.mark.parametrize("number", range(_RUNS))
def test_a_task_while_each_service_is_killed(
    agent: Agent, packages: Path, tmp_path: Path, number: int
) -> None:
    _task(agent, packages, tmp_path, kills=True)
