"""Counts from gateways' metrics: by side, since the step began, over restarts."""

from __future__ import annotations

from observability.emit import names
from observability.emit.metrics import Metrics
from services.rollout.figures import GatewayPage, Sides, Tally, agreement, read_page

SIDES = Sides("chat", "chat@2", ("chat@1", "chat@0"))


class Told:
    """A gateway's metrics, written as gateways do."""

    def __init__(self) -> None:
        self.metrics = Metrics()

    def requests(self, model: str, outcome: str, number: int = 1) -> None:
        labels = {"face": "http", "model": model, "revision": "", "tier": "standard", "tenant": "acme"}
        self.metrics.add(names.REQUESTS, number, **labels, outcome=outcome)

    def page(self) -> GatewayPage:
        body, _ = self.metrics.expose()
        return read_page(body.decode(), SIDES)


def test_both_sides_are_counted_and_nobody_else() -> None:
    told = Told()
    for model, outcome, number in (
        ("chat@2", "ok", 5),
        ("chat@2", "failed", 2),
        ("chat@2", "refused", 1),
        ("chat@2", "cancelled", 9),
        ("chat@1", "ok", 70),
        ("chat@0", "failed", 3),
        ("small", "failed", 50),
    ):
        told.requests(model, outcome, number)
    told.metrics.add(names.GOODPUT, 4, tier="standard", model="chat@2", met="false")
    told.metrics.add(names.GUIDED_OUTPUTS, 2, kind="json_schema", model="chat@1", valid="true")
    told.metrics.add(names.TOOL_CALLS, 1, model="chat@1", valid="false")
    counts = told.page().counts
    assert (counts["candidate.errors.all"], counts["candidate.errors.bad"]) == (8, 3)
    assert (counts["baseline.errors.all"], counts["baseline.errors.bad"]) == (73, 3)
    assert (counts["candidate.goodput.all"], counts["candidate.goodput.bad"]) == (4, 4)
    assert (counts["baseline.validity.all"], counts["baseline.validity.bad"]) == (3, 1)


def test_pairs_and_agreement_are_those_of_the_alias_and_the_candidate() -> None:
    told = Told()
    for shadow, value in (("chat@2", 1.0), ("chat@2", 0.97), ("chat@2", 0.0), ("small", 0.5)):
        told.metrics.observe(names.SHADOW_AGREEMENT, value, model="chat", shadow=shadow)
        told.metrics.add(names.SHADOW_PAIRS, model="chat", shadow=shadow, better="live")
    counts = told.page().counts
    assert counts["shadow.better.live"] == 3
    assert {bound: count for bound, count in agreement(counts).items() if count} == {0.0: 1, 0.99: 1, 1.0: 1}


def test_shares_and_engines_are_those_of_the_alias() -> None:
    told = Told()
    for alias in ("chat", "other"):
        told.metrics.set(names.ROUTE_SHARE, 0.25, alias=alias, model="chat@2")
        told.metrics.set(names.ROUTE_ENGINES, 3, alias=alias, model="chat@2")
    page = told.page()
    assert (page.shares, page.engines) == ({"chat@2": 0.25}, {"chat@2": 3.0})


def page(started_s: float, number: float) -> GatewayPage:
    return GatewayPage(started_s=started_s, counts={"candidate.errors.all": number})


def test_counts_are_those_since_the_step_began() -> None:
    tally = Tally().after({"a": page(1, 100), "b": page(1, 50)})
    assert tally.counts == {}
    tally = tally.after({"a": page(1, 104), "b": page(1, 50)})
    assert tally.counts == {"candidate.errors.all": 4}
    # One is away for a while, and nothing of it is lost.
    tally = tally.after({"b": page(1, 51)}).after({"a": page(1, 110), "b": page(1, 51)})
    assert tally.counts == {"candidate.errors.all": 11}
    # One was started again: it counts from 0, even where it has counted more by now.
    tally = tally.after({"a": page(2, 120)})
    assert tally.counts == {"candidate.errors.all": 131}
    assert tally.anew().after({"a": page(2, 121)}).counts == {"candidate.errors.all": 1}
