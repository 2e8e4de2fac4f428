"""From figures to a decision: no clock, no network, nothing kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from services.gate.cases import GateVerdict
from services.rollout.evidence import Evidence, judge
from services.rollout.figures import CANDIDATE, ERRORS
from services.rollout.plan import RolloutPlan


class RolloutAction(StrEnum):
    """What is done with the candidate's share."""

    BEGIN = "begin"
    ADVANCE = "advance"
    HOLD = "hold"
    TAKE_BACK = "take back"


class Why(StrEnum):
    """What decided; one that has not changed is not written down again."""

    WORSE = "worse"
    NO_ENGINE = "no engine"
    PATIENCE = "patience"
    UNFOLLOWED = "gateways do not follow"
    UNSEEN = "no gateway answers"
    TIME = "time"
    REQUESTS = "requests"
    PROOF = "proof"
    GATE = "gate"
    BY_HAND = "by hand"
    GOOD = "good"
    RESUMED = "resumed"


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """All that a decision depends on beside the plan."""

    step: int
    # Since the step began.
    seconds: float
    counts: Mapping[str, float]
    # Gateways that answered, and those of them that do not have this step's share yet.
    num_gateways: int
    unfollowed: Sequence[str] = ()
    # For how long no gateway has had an engine for the candidate; 0 while one has.
    without_engine_s: float = 0.0
    # Of the suite; NOT_ENOUGH while it runs, with what it says of itself.
    gate: GateVerdict = GateVerdict.NOT_ENOUGH
    gate_note: str = "its suite runs"


class RolloutDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, and why."""

    action: RolloutAction
    why: Why
    reason: str
    evidence: tuple[Evidence, ...] = ()


def decide(plan: RolloutPlan, now: Situation) -> RolloutDecision:
    """What is bad takes back at once; what lacks holds; then the next step."""
    evidence = tuple(judge(now.counts, plan))
    found = _bad(plan, now, evidence)
    if found is not None:
        return _decision(RolloutAction.TAKE_BACK, found, evidence)
    found = _lacking(plan, now, evidence)
    if found is None:
        reason = f"{_named(evidence)} under a share of {plan.share(now.step):g}"
        return _decision(RolloutAction.ADVANCE, (Why.GOOD, reason), evidence)
    if plan.patience_s and now.seconds >= plan.patience_s:
        reason = f"after {now.seconds:.0f} s it still lacks this: {found[1]}"
        return _decision(RolloutAction.TAKE_BACK, (Why.PATIENCE, reason), evidence)
    return _decision(RolloutAction.HOLD, found, evidence)


def _bad(plan: RolloutPlan, now: Situation, evidence: Sequence[Evidence]) -> tuple[Why, str] | None:
    for each in evidence:
        if each.verdict is GateVerdict.WORSE:
            return Why.WORSE, (
                f"{each.figure}: {each.candidate:.1%} of {each.num_candidate} are bad, of the baseline's "
                f"{each.num_baseline} {each.baseline:.1%}"
            )
    if plan.gate is not None and now.gate is GateVerdict.WORSE:
        return Why.WORSE, f"the gate: {now.gate_note}"
    if now.num_gateways and now.without_engine_s > plan.engine_grace_s:
        return Why.NO_ENGINE, f"no engine has answered for {now.without_engine_s:.1f} s"
    return None


def _lacking(plan: RolloutPlan, now: Situation, evidence: Sequence[Evidence]) -> tuple[Why, str] | None:
    """The first thing that keeps it from the next step."""
    return next(chain(_unseen(now), _unshown(plan, now, evidence)), None)


def _unseen(now: Situation) -> Iterator[tuple[Why, str]]:
    if not now.num_gateways:
        yield Why.UNSEEN, "no gateway tells its metrics"
    if now.unfollowed:
        told = ", ".join(now.unfollowed)
        yield Why.UNFOLLOWED, f"{told} has another share; was [routes] edited meanwhile?"
    if now.without_engine_s:
        yield Why.NO_ENGINE, f"no engine has answered for {now.without_engine_s:.1f} s"


def _unshown(plan: RolloutPlan, now: Situation, evidence: Sequence[Evidence]) -> Iterator[tuple[Why, str]]:
    step = plan.steps[now.step]
    num_requests = now.counts.get(f"{CANDIDATE}.{ERRORS}.all", 0.0)
    if now.seconds < step.seconds:
        yield Why.TIME, f"{now.seconds:.0f} of {step.seconds:g} s"
    if num_requests < step.requests:
        yield Why.REQUESTS, f"{num_requests:.0f} of {step.requests} requests"
    open_figures = [each.figure for each in evidence if each.verdict is GateVerdict.NOT_ENOUGH]
    if step.proof and open_figures:
        yield Why.PROOF, f"not shown yet not to be worse: {', '.join(open_figures)}"
    if plan.gate is not None and now.gate is not GateVerdict.NOT_WORSE:
        yield Why.GATE, f"the gate: {now.gate_note}"
    if plan.advance == "by hand":
        yield Why.BY_HAND, "ready; `millrace rollout advance` goes on"


def _named(evidence: Sequence[Evidence]) -> str:
    shown = [each.figure for each in evidence if each.verdict is GateVerdict.NOT_WORSE]
    return f"not worse: {', '.join(shown)}" if shown else "nothing is worse"


def _decision(
    action: RolloutAction, found: tuple[Why, str], evidence: tuple[Evidence, ...]
) -> RolloutDecision:
    return RolloutDecision(action=action, why=found[0], reason=found[1], evidence=evidence)
