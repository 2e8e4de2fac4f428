"""Rollouts under load, on real engines: a bad version takes itself back at 1 %, a good one gets all; every
request is answered and is in the ledger.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import psutil
import pytest

from observability.emit import names
from observability.emit.rollouts import DECISION
from services.bench.client import BenchTarget, Client
from services.bench.records import RequestRecord
from services.bench.workload import PlannedRequest
from services.rollout.store import RolloutStore, StoredDecision
from services.supervisor.config import BUNDLED_MODEL
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, START_LIMIT_S, Stack, eventually, running_stack

pytestmark = [pytest.mark.e2e, needs_weights]

NUM_AT_A_TIME = 6
MODELS = """
[gateway.routing]
continuation_wait_s = 60
[models."chat@1"]
path = "{good}"
[models."chat@2"]
path = "{good}"
[models."chat@3"]
path = "{bad}"
[models."chat@4"]
path = "{good}"
# It has no room for any of the requests, and refuses them.
max_context_tokens = 8
[routes]
chat = {{"chat@1" = 100, "chat@2" = 0}}
fail = {{"chat@1" = 100, "chat@4" = 0}}
talk = {{"chat@1" = 100, "chat@3" = 0}}
[shadows.talk]
model = "chat@3"
"""
STEPS = """
interval_s = 0.25
engine_grace_s = 0.5
[live]
errors = 0.3
[shadow]
delta = 0.3
agreement = 0.8
[[steps]]
share = 0.01
requests = 1
seconds = {first_s}
proof = false
[[steps]]
share = 0.1
requests = 3
seconds = 1
proof = false
[[steps]]
share = 0.5
requests = 20
seconds = 1
"""


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("rollout")
    bad = folder / "bad"
    shutil.copytree(BUNDLED_MODEL, bad, ignore=shutil.ignore_patterns("adapters", "README.md"))
    found = json.loads((bad / "config.json").read_text())
    # It loads, answers quickly, and says nothing of use.
    (bad / "config.json").write_text(json.dumps({**found, "rope_theta": 20.0}))
    config = CONFIG + MODELS.format(good=BUNDLED_MODEL, bad=bad)
    with running_stack(folder, "--gateways", "2", config=config, model=None) as stack:
        yield stack


class Load:
    """Requests to an alias, one after the other in each of several conversations, until it is ended."""

    # No two loads have the same conversations.
    _numbers = itertools.count()

    def __init__(self, stack: Stack, alias: str) -> None:
        self._stack, self._alias = stack, alias
        self._ending = threading.Event()
        self.records: list[RequestRecord] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._drive()))

    @contextmanager
    def running(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._ending.set()
            self._thread.join()

    async def _drive(self) -> None:
        client = Client(BenchTarget.parse(self._stack.url, self._stack.state.api_key))

        async def work() -> None:
            while not self._ending.is_set():
                self.records.append(await client.run(self._planned(next(self._numbers))))

        await asyncio.gather(*(work() for _ in range(NUM_AT_A_TIME)))
        await client.close()

    def _planned(self, number: int) -> PlannedRequest:
        body = {
            "model": self._alias,
            "messages": [{"role": "user", "content": f"Tell me a story about {number} foxes."}],
            "max_tokens": 12,
            "temperature": 0,
            "stream": True,
            "prompt_cache_key": str(number),
        }
        return PlannedRequest(
            index=number,
            start_s=0.0,
            tier="",
            path="/v1/chat/completions",
            body=msgspec.json.encode(body),
            prompt_tokens=1,
        )

    def share_of(self, model: str) -> float:
        return sum(each.model == model for each in self.records) / len(self.records)


COMMAND = (sys.executable, "-P", "-m", "services.cli", "rollout")


def environment(stack: Stack) -> dict[str, str]:
    return {**os.environ, "MILLRACE_STATE_DIR": str(stack.directory)}


def start(stack: Stack, alias: str, candidate: str, first_s: float = 1) -> subprocess.Popen[str]:
    """`millrace rollout run` in a process of its own."""
    plan = stack.directory / f"{alias}-{first_s:g}.toml"
    plan.write_text(STEPS.format(first_s=first_s))
    return subprocess.Popen(
        [*COMMAND, "run", alias, candidate, "--plan", plan],
        env=environment(stack),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit status, and what it has said."""
    told, _ = process.communicate(timeout=START_LIMIT_S)
    return process.returncode, told


def history(stack: Stack, alias: str) -> list[StoredDecision]:
    store = RolloutStore(f"sqlite:///{stack.directory / 'ledger.sqlite'}")
    try:
        return store.decisions(alias)
    finally:
        store.close()


def decided(stack: Stack, alias: str) -> list[tuple[str, float]]:
    """Decisions that changed something, and the candidate's share after each."""
    return [(each.action, each.share_after) for each in history(stack, alias) if each.action != "hold"]


def said(stack: Stack, *arguments: str) -> str:
    """What `millrace ...` prints; lines are not folded."""
    command = (sys.executable, "-P", "-m", "services.cli", *arguments)
    variables = {**environment(stack), "COLUMNS": "500"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


def assert_decisions_are_one_trace(stack: Stack, alias: str) -> None:
    """Those of the alias's last rollout, whoever made them, as `millrace trace` shows them. A watcher that is
    killed as soon as it has decided may not have sent its span.
    """
    (found,) = json.loads(said(stack, "rollout", "status", alias, "--json"))
    rows = history(stack, alias)
    begin = max(at for at, row in enumerate(rows) if row.action == "begin")

    def shown() -> list[str]:
        lines = said(stack, "trace", found["trace"]).splitlines()
        told = [each.partition(DECISION)[2] for each in lines if DECISION in each]
        return [each.partition("decision ")[2].partition(" ·")[0] for each in told]

    actions = [row.action for row in rows[begin:]]
    assert eventually(lambda: shown() in (actions, actions[1:])), (shown(), actions)


def num_rows(stack: Stack) -> int:
    with closing(sqlite3.connect(f"file:{stack.directory / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        (number,) = ledger.execute(
            "SELECT COUNT(*) FROM requests WHERE outcome IN ('stop', 'length')"
        ).fetchone()
    return int(number)


def assert_nothing_lost(stack: Stack, load: Load, before: int) -> None:
    """Every request was answered to its end, and has its row in the ledger."""
    failed = [each.error for each in load.records if not each.ok]
    assert not failed, failed[0]
    assert eventually(lambda: num_rows(stack) == before + len(load.records)), (
        num_rows(stack) - before,
        len(load.records),
    )


def test_one_that_answers_garbage_takes_itself_back_at_one_per_cent(versions: Stack) -> None:
    before, load = num_rows(versions), Load(versions, "talk")
    with load.running():
        status, told = ended(start(versions, "talk", "chat@3", first_s=120))
    assert status == 1, told
    assert decided(versions, "talk") == [("begin", 0.01), ("take back", 0.0)]
    last = history(versions, "talk")[-1]
    assert last.reason.startswith("shadow agreement"), last
    (evidence,) = [each for each in last.evidence if each.figure == "shadow agreement"]
    assert evidence.verdict == "worse"
    # Of the requests hardly any have met it.
    assert load.share_of("chat@3") < 0.05
    assert_nothing_lost(versions, load, before)


def test_one_that_fails_takes_itself_back_after_a_few_requests(versions: Stack) -> None:
    before, load = num_rows(versions), Load(versions, "fail")
    with load.running():
        status, told = ended(start(versions, "fail", "chat@4", first_s=120))
    assert status == 1, told
    assert decided(versions, "fail") == [("begin", 0.01), ("take back", 0.0)]
    assert history(versions, "fail")[-1].reason.startswith("errors"), told
    refused = [each for each in load.records if not each.ok]
    # Those that have met it were told so, and nobody else was.
    assert {each.status for each in refused} == {400}
    assert len(refused) < 0.05 * len(load.records)
    load.records = [each for each in load.records if each.ok]
    assert_nothing_lost(versions, load, before)


def engine_of(stack: Stack, model: str) -> int:
    """Process id of the model's engine."""
    for each in stack.state.processes:
        with psutil.Process(each.pid).oneshot():
            environment = psutil.Process(each.pid).environ()
        if each.name.startswith("engine") and environment.get("MILLRACE_MODEL__NAME", "").strip('"') == model:
            return each.pid
    raise AssertionError(stack.transcript())


def has_engine(stack: Stack, model: str) -> bool:
    """Whether every gateway has one for the model."""
    return all(
        reading.value(names.ROUTE_ENGINES, alias="chat", model=model) > 0
        for reading in stack.metrics("gateway")
    )


def test_one_whose_engine_dies_takes_itself_back_at_one_per_cent(versions: Stack) -> None:
    before, load = num_rows(versions), Load(versions, "chat")
    with load.running():
        process = start(versions, "chat", "chat@2", first_s=120)
        assert eventually(lambda: decided(versions, "chat") == [("begin", 0.01)])
        os.kill(engine_of(versions, "chat@2"), signal.SIGKILL)
        status, told = ended(process)
    assert status == 1, told
    assert decided(versions, "chat")[-2:] == [("begin", 0.01), ("take back", 0.0)]
    assert_nothing_lost(versions, load, before)


def test_a_good_one_gets_all_though_its_watcher_is_killed(versions: Stack) -> None:
    # The engine that was killed is back.
    assert eventually(lambda: has_engine(versions, "chat@2"), START_LIMIT_S)
    before, load, known = num_rows(versions), Load(versions, "chat"), len(decided(versions, "chat"))
    with load.running():
        process = start(versions, "chat", "chat@2")
        assert eventually(lambda: len(decided(versions, "chat")) > known)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        status, told = ended(start(versions, "chat", "chat@2"))
        assert status == 0, told
        # Gateways follow before it ends.
        number = len(load.records)
        assert eventually(lambda: len(load.records) > number + 2 * NUM_AT_A_TIME)
    assert decided(versions, "chat")[known:] == [
        ("begin", 0.01),
        ("advance", 0.1),
        ("advance", 0.5),
        ("advance", 1.0),
    ]
    decisions = json.loads(said(versions, "rollout", "history", "chat", "--json"))
    assert [each["why"] for each in decisions].count("resumed") == 1
    assert {each.model for each in load.records[number + NUM_AT_A_TIME :]} == {"chat@2"}
    assert_decisions_are_one_trace(versions, "chat")
    assert_nothing_lost(versions, load, before)
