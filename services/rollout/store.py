"""Rollouts and their decisions in a database: what a killed watcher goes on from, and what anybody reads.

A decision, its evidence and the weights that it sets are one transaction. Whoever decides names the version
that it has seen, so that of two who decide at once only one does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
from opentelemetry.trace import Span
from opentelemetry.util.types import AttributeValue
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from gateway.models.route_store import RouteWeights, beat, open_route_store, read_weights, write_weights
from observability.emit import rollouts
from observability.emit.tracing import traceparent_of
from runtime.errors import ConfigError
from services.rollout.decision import RolloutAction, RolloutDecision, Why
from services.rollout.evidence import Evidence
from services.rollout.figures import Sides, Tally
from services.rollout.plan import RolloutPlan
from services.rollout.traces import RolloutTraces

_METADATA = MetaData()

_ROLLOUTS = Table(
    "rollouts",
    _METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("alias", String(256), nullable=False, index=True),
    # The alias while it runs: an alias has one rollout at a time.
    Column("running", String(256), unique=True),
    Column("candidate", String(256), nullable=False),
    # The file's weights by model, as JSON.
    Column("configured", Text, nullable=False),
    Column("plan", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("step", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("began_unix_ms", BigInteger, nullable=False),
    Column("step_unix_ms", BigInteger, nullable=False),
    # Who watches, its last sign of life, and what it has counted.
    Column("watcher", String(128), nullable=False),
    Column("beat_unix_ms", BigInteger, nullable=False),
    Column("progress", Text, nullable=False),
)
_DECISIONS = Table(
    "rollout_decisions",
    _METADATA,
    Column("id", Integer, primary_key=True, autoincrement=True),
    Column("rollout", Integer, nullable=False, index=True),
    Column("alias", String(256), nullable=False),
    Column("candidate", String(256), nullable=False),
    Column("decided_unix_ms", BigInteger, nullable=False),
    Column("who", String(128), nullable=False),
    Column("action", String(16), nullable=False),
    Column("why", String(32), nullable=False),
    Column("reason", Text, nullable=False),
    # Of the candidate, from 0 to 1.
    Column("share_before", Float, nullable=False),
    Column("share_after", Float, nullable=False),
    # A list of Evidence, as JSON.
    Column("evidence", Text, nullable=False),
)


class RolloutState(StrEnum):
    """Where a rollout is."""

    RUNNING = "running"
    DONE = "done"
    TAKEN_BACK = "taken back"


class RolloutProgress(msgspec.Struct, frozen=True, kw_only=True):
    """What a watcher has seen since the step began."""

    tally: Tally = Tally()
    # Verdict of the suite and what it says of itself; "" while it is open.
    gate: str = ""
    gate_note: str = ""
    # Of the span of the decision that began it; "" where no spans are made.
    traceparent: str = ""

    @property
    def trace_id(self) -> str:
        """Of its decisions' spans, as `millrace trace` takes it; "" where there are none."""
        return self.traceparent.split("-")[1] if self.traceparent else ""


class StoredRollout(msgspec.Struct, frozen=True, kw_only=True):
    """A row."""

    id: int
    sides: Sides
    configured: dict[str, float]
    plan: RolloutPlan
    state: RolloutState
    # Index of the plan's step; as many as there are when it is done.
    step: int
    version: int
    began_unix_ms: int
    step_unix_ms: int
    watcher: str
    beat_unix_ms: int
    progress: RolloutProgress

    @property
    def share(self) -> float:
        """The candidate's share now."""
        return 0.0 if self.state is RolloutState.TAKEN_BACK else self.plan.share(self.step)


class StoredDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A row."""

    alias: str
    candidate: str
    decided_unix_ms: int
    who: str
    action: str
    why: str
    reason: str
    share_before: float
    share_after: float
    evidence: tuple[Evidence, ...]


class RolloutMoved(Exception):
    """Somebody else has decided meanwhile: read it again."""


class RolloutStore:
    """One database of rollouts. Every method waits for it; raises SQLAlchemyError when it is away.

    What is decided is a span of `traces`, too.
    """

    def __init__(
        self, url: str, *, traces: RolloutTraces | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._engine = open_route_store(url, _METADATA)
        self._clock = clock
        self.traces = traces or RolloutTraces()

    def close(self) -> None:
        """Releases connections."""
        self._engine.dispose()

    def begin(
        self, sides: Sides, configured: dict[str, float], plan: RolloutPlan, who: str, watcher: str
    ) -> StoredRollout:
        """Sets the first step's share; raises ConfigError where the alias has a rollout that runs."""
        now_ms, span = self._now_ms(), self.traces.start()
        traceparent, _ = traceparent_of(span)
        row = {
            "alias": sides.alias,
            "running": sides.alias,
            "candidate": sides.candidate,
            "configured": _encoded(configured),
            "plan": _encoded(plan),
            "state": RolloutState.RUNNING,
            "step": 0,
            "version": 1,
            "began_unix_ms": now_ms,
            "step_unix_ms": now_ms,
            "watcher": watcher,
            "beat_unix_ms": now_ms,
            "progress": _encoded(RolloutProgress(traceparent=traceparent)),
        }
        decision = RolloutDecision(
            action=RolloutAction.BEGIN, why=Why.GOOD, reason=f"{len(plan.steps)} steps, then all"
        )
        try:
            with self._engine.begin() as connection:
                found = connection.execute(insert(_ROLLOUTS).values(**row)).inserted_primary_key
                assert found is not None
                rollout = self._one(connection, int(found[0]))
                written = self._write(connection, None, rollout, decision, who)
        except IntegrityError as error:
            raise ConfigError(
                f"alias {sides.alias!r} has a rollout that runs already; `millrace rollout status` shows it, "
                "`millrace rollout abort` ends it"
            ) from error
        self._end(span, written)
        return rollout

    def latest(self, alias: str) -> StoredRollout | None:
        """The alias's rollout that runs, else its last one."""
        with self._engine.connect() as connection:
            ordered = select(_ROLLOUTS).where(_ROLLOUTS.c.alias == alias).order_by(_ROLLOUTS.c.id.desc())
            row = connection.execute(ordered.limit(1)).one_or_none()
        return None if row is None else _rollout(row)

    def read(self, rollout_id: int) -> StoredRollout:
        """A rollout as it is now."""
        with self._engine.connect() as connection:
            return self._one(connection, rollout_id)

    def all_latest(self) -> list[StoredRollout]:
        """That of every alias that has had one."""
        with self._engine.connect() as connection:
            aliases = connection.scalars(select(_ROLLOUTS.c.alias).distinct().order_by(_ROLLOUTS.c.alias))
            names = list(aliases)
        return [each for name in names if (each := self.latest(name)) is not None]

    def in_force(self, alias: str) -> RouteWeights | None:
        """What an earlier rollout has left for gateways."""
        with self._engine.connect() as connection:
            return next((each for each in read_weights(connection) if each.alias == alias), None)

    def claim(self, rollout: StoredRollout, watcher: str) -> StoredRollout:
        """Takes over from a watcher that is gone; raises RolloutMoved where another one is first."""
        return self._change(rollout, {"watcher": watcher, "beat_unix_ms": self._now_ms()})

    def beat(self, rollout: StoredRollout, progress: RolloutProgress) -> StoredRollout:
        """Keeps what has been counted, and tells gateways that somebody watches; raises RolloutMoved."""
        now_ms = self._now_ms()
        changed = {"beat_unix_ms": now_ms, "progress": _encoded(progress)}
        with self._engine.begin() as connection:
            self._update(connection, rollout, changed)
            beat(connection, rollout.sides.alias, now_ms)
        return msgspec.structs.replace(rollout, beat_unix_ms=now_ms, progress=progress)

    def decide(self, rollout: StoredRollout, decision: RolloutDecision, who: str) -> StoredRollout:
        """Does it and writes it down; raises RolloutMoved where somebody else has decided meanwhile."""
        span = self.traces.start(rollout.progress.traceparent)
        changed: dict[str, Any] = {"version": rollout.version + 1}
        if decision.action is RolloutAction.ADVANCE:
            step = rollout.step + 1
            progress = msgspec.structs.replace(rollout.progress, tally=rollout.progress.tally.anew())
            changed |= {"step": step, "step_unix_ms": self._now_ms(), "progress": _encoded(progress)}
            if step == len(rollout.plan.steps):
                changed |= {"state": RolloutState.DONE, "running": None}
        elif decision.action is RolloutAction.TAKE_BACK:
            changed |= {"state": RolloutState.TAKEN_BACK, "running": None}
        with self._engine.begin() as connection:
            self._update(connection, rollout, changed)
            after = self._one(connection, rollout.id)
            written = self._write(connection, rollout, after, decision, who)
        self._end(span, written)
        return after

    def decisions(self, alias: str = "", limit: int = 50) -> list[StoredDecision]:
        """The latest ones, oldest first; "" is of every alias."""
        query = select(_DECISIONS).order_by(_DECISIONS.c.id.desc()).limit(limit)
        if alias:
            query = query.where(_DECISIONS.c.alias == alias)
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [_decision(row) for row in reversed(rows)]

    def _change(self, rollout: StoredRollout, changed: dict[str, Any]) -> StoredRollout:
        with self._engine.begin() as connection:
            self._update(connection, rollout, {**changed, "version": rollout.version + 1})
            return self._one(connection, rollout.id)

    def _update(self, connection: Connection, rollout: StoredRollout, changed: dict[str, Any]) -> None:
        seen = (_ROLLOUTS.c.id == rollout.id, _ROLLOUTS.c.version == rollout.version)
        if not connection.execute(update(_ROLLOUTS).where(*seen).values(**changed)).rowcount:
            raise RolloutMoved

    def _one(self, connection: Connection, rollout_id: int) -> StoredRollout:
        return _rollout(connection.execute(select(_ROLLOUTS).where(_ROLLOUTS.c.id == rollout_id)).one())

    def _end(self, span: Span, written: StoredDecision) -> None:
        told: dict[str, AttributeValue] = {
            rollouts.ALIAS: written.alias,
            rollouts.CANDIDATE: written.candidate,
            rollouts.ACTION: written.action,
            rollouts.WHY: written.why,
            rollouts.REASON: written.reason,
            rollouts.WHO: written.who,
            rollouts.SHARE_BEFORE: written.share_before,
            rollouts.SHARE_AFTER: written.share_after,
        }
        self.traces.end(span, told, written.evidence)

    def _write(
        self,
        connection: Connection,
        before: StoredRollout | None,
        after: StoredRollout,
        decision: RolloutDecision,
        who: str,
    ) -> StoredDecision:
        """A row for the decision, which is returned, and what gateways are to do."""
        now_ms = self._now_ms()
        written = StoredDecision(
            alias=after.sides.alias,
            candidate=after.sides.candidate,
            decided_unix_ms=now_ms,
            who=who,
            action=decision.action.value,
            why=decision.why.value,
            reason=decision.reason,
            share_before=0.0 if before is None else before.share,
            share_after=after.share,
            evidence=decision.evidence,
        )
        row = {**msgspec.structs.asdict(written), "evidence": _encoded(decision.evidence)}
        connection.execute(insert(_DECISIONS).values(rollout=after.id, **row))
        if before is not None and before.share == after.share and before.state is after.state:
            return written
        without = weights_of(after.configured, after.sides.candidate, 0.0)
        write_weights(
            connection,
            RouteWeights(
                alias=after.sides.alias,
                weights=weights_of(after.configured, after.sides.candidate, after.share),
                without=without,
                configured=after.configured,
                is_running=after.state is RolloutState.RUNNING,
                heartbeat=now_ms,
                dead_man_s=after.plan.dead_man_s,
            ),
        )
        return written

    def _now_ms(self) -> int:
        return round(self._clock() * 1000)


def weights_of(configured: dict[str, float], candidate: str, share: float) -> dict[str, float]:
    """Weights of 100 in all that give the candidate `share`, from 0 to 1, and leave the others theirs."""
    others = {name: weight for name, weight in configured.items() if name != candidate}
    rest = 100.0 * (1.0 - share) / sum(others.values())
    return {name: 100.0 * share if name == candidate else others[name] * rest for name in configured}


def _encoded(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _rollout(row: Row[Any]) -> StoredRollout:
    configured = msgspec.json.decode(row.configured, type=dict[str, float])
    others = tuple(name for name in configured if name != row.candidate)
    return StoredRollout(
        id=row.id,
        sides=Sides(row.alias, row.candidate, others),
        configured=configured,
        plan=msgspec.json.decode(row.plan, type=RolloutPlan),
        state=RolloutState(row.state),
        step=row.step,
        version=row.version,
        began_unix_ms=row.began_unix_ms,
        step_unix_ms=row.step_unix_ms,
        watcher=row.watcher,
        beat_unix_ms=row.beat_unix_ms,
        progress=msgspec.json.decode(row.progress, type=RolloutProgress),
    )


def _decision(row: Row[Any]) -> StoredDecision:
    return StoredDecision(
        alias=row.alias,
        candidate=row.candidate,
        decided_unix_ms=row.decided_unix_ms,
        who=row.who,
        action=row.action,
        why=row.why,
        reason=row.reason,
        share_before=row.share_before,
        share_after=row.share_after,
        evidence=msgspec.json.decode(row.evidence, type=tuple[Evidence, ...]),
    )
