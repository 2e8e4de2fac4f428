"""What the differences of a layer say, and what all layers say together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from services.gate import statistics
from services.gate.cases import GateVerdict, LayerName, Scored
from services.gate.scoring import INTRINSIC_SCALE
from services.gate.statistics import Differences, mean_of
from services.gate.suite import Suite

# What a baseline gets at least for a layer to say much: it cannot lose what it does not have.
_TELLING_SCORE = 0.1
_BINARY = ("task", "structure", "long_context", "behaviour")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A length and a depth of the long contexts: mean scores over its cases."""

    length: int
    depth: float
    baseline: float
    candidate: float
    num_cases: int


class LayerResult(msgspec.Struct, frozen=True, kw_only=True):
    """One layer. Differences are in the layer's unit: scores from 0 to 1, or nats a token (intrinsic)."""

    layer: LayerName
    verdict: GateVerdict
    decides: bool
    delta: float
    # How much better the baseline is: the mean over questions, and bounds that hold at every look.
    difference: float
    lower: float
    upper: float
    # For a fixed number of cases, at 95 %.
    bootstrap_lower: float
    bootstrap_upper: float
    # McNemar's p of so many cases lost; none where scores are no rights and wrongs.
    mcnemar_p: float | None
    # At every look: how probable so much evidence of being worse is for identical deployments, at most.
    p_value: float
    baseline: float
    candidate: float
    num_cases: int
    num_questions: int
    more_needed: int | None = None
    note: str = ""
    cells: tuple[Cell, ...] = ()
    # Those that lost most.
    lost: tuple[Scored, ...] = ()


class LayerRule(msgspec.Struct, frozen=True, kw_only=True):
    """When a layer is decided. Bounds are in units of the differences."""

    delta: float
    # Levels of "worse" and of "not worse".
    alarm: float
    miss: float
    # Whether a difference in either direction is worse.
    two_sided: bool = False

    def decide(self, differences: Differences) -> GateVerdict:
        """The verdict on the differences of questions [n] so far."""
        towards = towards_worse(differences, two_sided=self.two_sided)
        alarm = self.alarm / (2 if self.two_sided else 1)
        is_large = len(differences) > 0 and mean_of(towards) >= self.delta
        if is_large and statistics.evidence_above(towards) >= math.log(1 / alarm):
            return GateVerdict.WORSE
        # In both directions, if either counts.
        sides = (differences, _mirrored(differences)) if self.two_sided else (differences,)
        evidence = min(statistics.evidence_below(side, self.delta) for side in sides)
        return GateVerdict.NOT_WORSE if evidence >= math.log(1 / self.miss) else GateVerdict.NOT_ENOUGH


def rule_of(layer: LayerName, suite: Suite, *, two_sided: bool = False) -> LayerRule:
    """The rule of a layer: those that decide share the suite's rate of false alarms."""
    delta = suite.delta(layer) / (INTRINSIC_SCALE if layer == "intrinsic" else 1.0)
    return LayerRule(delta=min(delta, 0.999), alarm=suite.alarm(), miss=suite.miss, two_sided=two_sided)


def judge_layer(
    layer: LayerName, scored: Sequence[Scored], suite: Suite, *, two_sided: bool = False
) -> LayerResult:
    """The verdict after these cases, and what else there is to say."""
    scale = INTRINSIC_SCALE if layer == "intrinsic" else 1.0
    rule = rule_of(layer, suite, two_sided=two_sided)
    differences = differences_of(scored)
    verdict = rule.decide(differences)
    towards = towards_worse(differences, two_sided=two_sided)
    evidence = statistics.evidence_above(towards)
    plain = statistics.bootstrap(differences)
    ours, theirs = [each.baseline for each in scored], [each.candidate for each in scored]
    more = statistics.more_needed(towards, rule.delta, rule.alarm, rule.miss)
    return LayerResult(
        layer=layer,
        verdict=verdict,
        decides=suite.decides(layer),
        delta=suite.delta(layer),
        difference=mean_of(differences) * scale,
        lower=statistics.interval(differences, rule.alarm).lower * scale,
        upper=statistics.interval(differences, rule.miss).upper * scale,
        bootstrap_lower=plain.lower * scale,
        bootstrap_upper=plain.upper * scale,
        mcnemar_p=statistics.mcnemar(ours, theirs) if layer in _BINARY else None,
        p_value=min(1.0, math.exp(-evidence) * (2 if two_sided else 1)),
        baseline=mean_of(ours),
        candidate=mean_of(theirs),
        num_cases=len(scored),
        num_questions=len(differences),
        more_needed=more if verdict is GateVerdict.NOT_ENOUGH else None,
        note=_note(layer, ours, two_sided),
        cells=_cells(scored),
        lost=_lost(scored),
    )


def towards_worse(differences: Differences, *, two_sided: bool) -> Differences:
    """Differences of which a positive mean is worse: turned over where either direction is, and they gain."""
    return _mirrored(differences) if two_sided and mean_of(differences) < 0 else differences


def _mirrored(differences: Differences) -> list[float]:
    return [-each for each in differences]


def differences_of(scored: Sequence[Scored]) -> Differences:
    """Those of questions, in the order in which they were asked."""
    return statistics.by_question(
        [each.case.question for each in scored], [each.difference for each in scored]
    )


def overall(results: Sequence[LayerResult]) -> GateVerdict:
    """Worse if any layer that decides is; not worse only if all of them are not."""
    verdicts = {each.verdict for each in results if each.decides}
    order = (GateVerdict.WORSE, GateVerdict.NOT_ENOUGH)
    return next((each for each in order if each in verdicts), GateVerdict.NOT_WORSE)


def _note(layer: LayerName, baseline: Sequence[float], two_sided: bool) -> str:
    if two_sided:
        return (
            "the baseline does not answer equal seeds equally: how probable answers are is compared instead"
        )
    if layer in _BINARY and mean_of(baseline) < _TELLING_SCORE:
        return "the baseline itself is hardly ever right here, so little can be lost: take other cases"
    return ""


def _cells(scored: Sequence[Scored]) -> tuple[Cell, ...]:
    groups: dict[tuple[int, float], list[Scored]] = {}
    for each in scored:
        if each.case.layer == "long_context":
            groups.setdefault((each.case.length, each.case.depth), []).append(each)
    return tuple(
        Cell(
            length=length,
            depth=depth,
            baseline=mean_of([each.baseline for each in found]),
            candidate=mean_of([each.candidate for each in found]),
            num_cases=len(found),
        )
        for (length, depth), found in sorted(groups.items())
    )


def _lost(scored: Sequence[Scored], most: int = 10) -> tuple[Scored, ...]:
    lost = [each for each in scored if each.difference > 0]
    return tuple(sorted(lost, key=lambda each: (-each.difference, each.case.id))[:most])
