"""The loop: it decides at every look, goes on where another one was killed, and yields to people."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.exc import OperationalError

from observability.emit import rollouts
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import Telemetry
from services.gate.cases import GateVerdict
from services.rollout.decision import RolloutAction, RolloutDecision, Why
from services.rollout.evidence import judge
from services.rollout.figures import GatewayPage, Sides
from services.rollout.plan import GateFigures, LiveFigures, RolloutPlan, RolloutStep, ShadowFigures
from services.rollout.store import RolloutMoved, RolloutState, RolloutStore, StoredRollout
from services.rollout.traces import RolloutTraces
from services.rollout.watch import RolloutWatch, WatchedElsewhere

SIDES = Sides("chat", "chat@2", ("chat@1",))
PLAN = RolloutPlan(
    steps=(
        RolloutStep(share=0.01, requests=10, seconds=0.0, proof=False),
        RolloutStep(share=0.5, requests=10, seconds=0.0, proof=False),
    ),
    interval_s=0.1,
    live=LiveFigures(errors=0.1),
    shadow=ShadowFigures(delta=0.0),
)
BY_HAND = RolloutDecision(action=RolloutAction.ADVANCE, why=Why.BY_HAND, reason="by hand")


def recorded(spans: InMemorySpanExporter) -> RolloutTraces:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return RolloutTraces(Telemetry("rollout", ObservabilityConfig(), provider))


class Rig:
    """A rollout in a database, and two gateways that do as it says."""

    def __init__(self, folder: Path, plan: RolloutPlan = PLAN) -> None:
        self.spans = InMemorySpanExporter()
        url = f"sqlite:///{folder / 'ledger.sqlite'}"
        self.store = RolloutStore(url, traces=recorded(self.spans), clock=lambda: self.now_s)
        self.now_s = 1000.0
        self.rollout = self.store.begin(SIDES, {"chat@1": 100.0, "chat@2": 0.0}, plan, "ada", "ada:1")
        self.told: list[RolloutDecision] = []
        self.counts = {"baseline.errors.all": 1000.0, "candidate.errors.all": 0.0}
        self.per_look = {"baseline.errors.all": 500.0, "candidate.errors.all": 5.0}
        self.engines = 1.0
        self.suite: tuple[GateVerdict, str] = (GateVerdict.NOT_WORSE, "fine")

    async def scrape(self, sides: Sides) -> dict[str, GatewayPage]:
        self.now_s += 1.0
        for name, number in self.per_look.items():
            self.counts[name] = self.counts.get(name, 0.0) + number
        share = self.latest.share
        page = GatewayPage(
            started_s=1.0,
            counts=dict(self.counts),
            shares={"chat@1": 1 - share, "chat@2": share},
            engines={"chat@2": self.engines},
        )
        return {"gateway-0": page, "gateway-1": page}

    @property
    def latest(self) -> StoredRollout:
        found = self.store.latest("chat")
        assert found is not None
        return found

    async def run_suite(self, _: StoredRollout) -> tuple[GateVerdict, str]:
        return self.suite

    def watch(self, watcher: str = "ada:1", **more: Any) -> RolloutWatch:
        return RolloutWatch(
            self.store,
            self.latest,
            **{"scrape": self.scrape, **more},
            watcher=watcher,
            run_suite=self.run_suite,
            tell=lambda _, decision: self.told.append(decision),
            clock=lambda: self.now_s,
        )

    def actions(self) -> list[str]:
        return [each.action for each in self.store.decisions()]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.store.close()


async def test_a_good_one_gets_all(rig: Rig) -> None:
    assert (await rig.watch().run()).state is RolloutState.DONE
    assert rig.actions() == ["begin", "advance", "advance"]
    errors = rig.store.decisions()[-1].evidence[0]
    # Counts of the last step alone, of both gateways.
    assert (errors.figure, errors.num_candidate) == ("errors", 10)


async def test_one_that_fails_goes_at_the_first_look_that_shows_it(rig: Rig) -> None:
    rig.per_look["candidate.errors.bad"] = 5.0
    assert (await rig.watch().run()).state is RolloutState.TAKEN_BACK
    assert rig.actions() == ["begin", "take back"]
    (decision,) = rig.told
    assert decision.evidence[0].num_candidate == 10


async def test_one_whose_engine_is_gone_goes_after_its_grace(rig: Rig) -> None:
    rig.engines = 0.0
    assert (await rig.watch().run()).state is RolloutState.TAKEN_BACK
    assert rig.actions() == ["begin", "hold", "take back"]
    assert {each.why for each in rig.told} == {Why.NO_ENGINE}


async def test_a_killed_watcher_s_rollout_goes_on_with_what_it_counted(rig: Rig) -> None:
    rig.per_look["candidate.errors.all"] = 1.0
    first = rig.watch()
    for _ in range(5):
        await first.look()
    counted = rig.latest.progress.tally.counts["candidate.errors.all"]
    assert counted == 8
    rig.store.claim(rig.latest, "grace:2")
    second = rig.watch("grace:2")
    await second.look()
    assert rig.actions() == ["begin", "hold", "advance"]
    # The first one is not dead after all: it stops.
    with pytest.raises(WatchedElsewhere):
        await first.run()


async def test_what_people_decide_holds(rig: Rig) -> None:
    watch = rig.watch()
    rig.per_look["candidate.errors.all"] = 0.0
    await watch.look()
    rig.store.decide(rig.latest, BY_HAND, "ada")
    running = asyncio.create_task(watch.run())
    taken_back = RolloutDecision(action=RolloutAction.TAKE_BACK, why=Why.BY_HAND, reason="a complaint")
    rig.store.decide(rig.latest, taken_back, "ada")
    assert (await running).state is RolloutState.TAKEN_BACK
    assert rig.actions() == ["begin", "advance", "take back"]


async def test_a_database_that_is_away_for_a_while_delays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    left, decide = [2], rig.store.decide

    def flaky(*arguments: Any) -> StoredRollout:
        if left[0]:
            left[0] -= 1
            raise OperationalError("away", None, Exception("away"))
        return decide(*arguments)

    monkeypatch.setattr(rig.store, "decide", flaky)
    assert (await rig.watch().run()).state is RolloutState.DONE
    assert left == [0]


async def test_gateways_that_do_not_follow_hold_it(rig: Rig) -> None:
    async def scrape(sides: Sides) -> dict[str, GatewayPage]:
        pages = await rig.scrape(sides)
        return {**pages, "gateway-1": GatewayPage(started_s=1.0, counts={})}

    stubborn = rig.watch(scrape=scrape)
    for _ in range(4):
        await stubborn.look()
    assert rig.store.decisions()[-1].reason == "gateway-1 has another share; was [routes] edited meanwhile?"
    assert rig.actions() == ["begin", "hold"]


@pytest.mark.parametrize(
    ("verdict", "state"),
    [(GateVerdict.NOT_WORSE, RolloutState.DONE), (GateVerdict.WORSE, RolloutState.TAKEN_BACK)],
)
async def test_the_suite_s_verdict_counts(tmp_path: Path, verdict: GateVerdict, state: RolloutState) -> None:
    rig = Rig(tmp_path, msgspec.structs.replace(PLAN, gate=GateFigures()))
    rig.suite = (verdict, f"task {verdict}")
    assert (await rig.watch().run()).state is state
    rig.store.close()


async def test_a_suite_that_cannot_be_run_holds_and_tells_why(tmp_path: Path) -> None:
    rig = Rig(tmp_path, msgspec.structs.replace(PLAN, gate=GateFigures(), patience_s=30.0))
    rig.suite = (GateVerdict.NOT_ENOUGH, "the server is away")
    assert (await rig.watch().run()).state is RolloutState.TAKEN_BACK
    assert rig.told[-1].why is Why.PATIENCE
    assert "the gate: the server is away" in rig.told[-1].reason
    rig.store.close()


def attributes_of(rig: Rig, name: str) -> list[dict[str, Any]]:
    """Of its spans of a name, in the order in which they ended, with the trace and what they are below."""
    return [
        {
            **(span.attributes or {}),
            "trace": f"{span.context.trace_id:032x}",
            "parent": span.parent and span.parent.span_id,
        }
        for span in rig.spans.get_finished_spans()
        if span.name == name
    ]


async def test_every_decision_is_a_span_with_its_evidence_in_one_trace(rig: Rig) -> None:
    first = rig.watch()
    await first.look()
    rig.store.claim(rig.latest, "grace:2")
    rig.store.decide(rig.latest, BY_HAND, "ada")
    rig.per_look["candidate.errors.bad"] = 5.0
    assert (await rig.watch("grace:2").run()).state is RolloutState.TAKEN_BACK
    spans, rows = attributes_of(rig, rollouts.DECISION), rig.store.decisions()
    # One for each row, and nothing that was not written down.
    told = [
        (each.action, each.why, each.reason, each.who, each.share_before, each.share_after) for each in rows
    ]
    keys = (rollouts.ACTION, rollouts.WHY, rollouts.REASON, rollouts.WHO)
    keys += (rollouts.SHARE_BEFORE, rollouts.SHARE_AFTER)
    assert [tuple(span[key] for key in keys) for span in spans] == told
    assert {span["trace"] for span in spans} == {rig.latest.progress.trace_id}
    begun, *later = spans
    assert begun["parent"] is None
    assert len({span["parent"] for span in later} - {None}) == 1
    (evidence,) = rows[-1].evidence
    shown = {field: spans[-1][key] for field, key in rollouts.EVIDENCE["errors"].items()}
    assert shown == {field: msgspec.to_builtins(getattr(evidence, field)) for field in shown}
    assert (shown["verdict"], shown["num_candidate"]) == ("worse", evidence.num_candidate)


async def test_who_comes_too_late_leaves_neither_row_nor_span(rig: Rig) -> None:
    seen = rig.latest
    rig.store.decide(seen, BY_HAND, "ada")
    with pytest.raises(RolloutMoved):
        rig.store.decide(seen, BY_HAND, "grace")
    assert [each[rollouts.WHO] for each in attributes_of(rig, rollouts.DECISION)] == ["ada", "ada"]


async def test_the_suite_is_a_span_of_the_trace(tmp_path: Path) -> None:
    rig = Rig(tmp_path, msgspec.structs.replace(PLAN, gate=GateFigures()))
    rig.suite = (GateVerdict.WORSE, "worse: task worse (+0.300)")
    await rig.watch().run()
    (suite,) = attributes_of(rig, rollouts.SUITE)
    assert (suite[rollouts.VERDICT], suite[rollouts.REASON]) == ("worse", "worse: task worse (+0.300)")
    assert suite["trace"] == rig.latest.progress.trace_id
    rig.store.close()


def test_figures_are_those_that_are_judged() -> None:
    counts = {"baseline.errors.all": 1.0, "baseline.goodput.all": 1.0, "baseline.validity.all": 1.0}
    counts |= {"shadow.better.live": 1.0, "shadow.agreement.0.5": 1.0}
    plan = RolloutPlan(shadow=ShadowFigures(agreement=0.5))
    assert [each.figure for each in judge(counts, plan)] == list(rollouts.FIGURES)
