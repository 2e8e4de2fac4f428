"""What gateways' metrics say of both sides of a rollout, added up over restarts of gateways and of ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from observability.emit import names

BASELINE, CANDIDATE = "baseline", "candidate"
# Rates of one side, as "<side>.<rate>.all" and "<side>.<rate>.bad".
ERRORS, GOODPUT, VALIDITY = "errors", "goodput", "validity"
# Pairs by who was better; answers by agreement, as "shadow.agreement.<upper bound>".
SHADOW_BETTER, SHADOW_AGREEMENT = "shadow.better.", "shadow.agreement."
_STARTED = "process_start_time_seconds"
_AGREEMENT_BUCKET = f"{names.SHADOW_AGREEMENT.name}_bucket"
# Of each rate: its counter, the label that tells, values that are bad, and those that are good.
_RATES = (
    (names.REQUESTS.name, ERRORS, "outcome", ("failed", "refused"), ("ok",)),
    (names.GOODPUT.name, GOODPUT, "met", ("false",), ("true",)),
    (names.GUIDED_OUTPUTS.name, VALIDITY, "valid", ("false",), ("true",)),
    (names.TOOL_CALLS.name, VALIDITY, "valid", ("false",), ("true",)),
)
_READ = (
    _STARTED,
    *(name for name, *_ in _RATES),
    names.SHADOW_PAIRS.name,
    _AGREEMENT_BUCKET,
    names.ROUTE_SHARE.name,
    names.ROUTE_ENGINES.name,
)

# Numbers by name, as above.
Counts = dict[str, float]


class Sides(NamedTuple):
    """Who is compared under which alias."""

    alias: str
    candidate: str
    # All other models of the alias.
    baseline: tuple[str, ...]


class GatewayPage(msgspec.Struct, frozen=True, kw_only=True):
    """What one gateway says: counts since it started, and what holds now."""

    started_s: float
    counts: Counts
    # Of the alias, by model; empty where the gateway does not know the alias.
    shares: dict[str, float] = {}
    engines: dict[str, float] = {}


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since a step began, and each gateway's page as it was counted last."""

    counts: Counts = {}
    pages: dict[str, GatewayPage] = {}

    def after(self, pages: Mapping[str, GatewayPage]) -> Tally:
        """With what has come since. A gateway that is seen for the first time counts from now on; one that
        was started again from its start; one that does not answer later.
        """
        counts = dict(self.counts)
        for address, page in pages.items():
            before = self.pages.get(address)
            if before is None:
                continue
            known = before.counts if before.started_s == page.started_s else {}
            for name, value in page.counts.items():
                if (more := value - known.get(name, 0.0)) > 0:
                    counts[name] = counts.get(name, 0.0) + more
        return Tally(counts=counts, pages={**self.pages, **pages})

    def anew(self) -> Tally:
        """For another step."""
        return Tally(pages=self.pages)


def read_page(text: str, sides: Sides) -> GatewayPage:
    """A gateway's metrics in Prometheus's text form."""
    counts, shares, engines, started_s = Counts(), dict[str, float](), dict[str, float](), 0.0
    below = dict[float, float]()
    for name, labels, value in _samples(text):
        if name == _STARTED:
            started_s = value
        elif name == names.ROUTE_SHARE.name and labels["alias"] == sides.alias:
            shares[labels["model"]] = value
        elif name == names.ROUTE_ENGINES.name and labels["alias"] == sides.alias:
            engines[labels["model"]] = value
        elif labels.get("shadow") == sides.candidate and labels.get("model") == sides.alias:
            if name == _AGREEMENT_BUCKET:
                below[float(labels["le"])] = below.get(float(labels["le"]), 0.0) + value
            elif name == names.SHADOW_PAIRS.name:
                _add(counts, f"{SHADOW_BETTER}{labels['better']}", value)
        else:
            _count_rates(counts, name, labels, value, sides)
    _count_agreement(counts, below)
    return GatewayPage(started_s=started_s, counts=counts, shares=shares, engines=engines)


def agreement(counts: Mapping[str, float]) -> dict[float, float]:
    """Answers by the upper bound of their agreement."""
    return {
        float(name.removeprefix(SHADOW_AGREEMENT)): count
        for name, count in counts.items()
        if name.startswith(SHADOW_AGREEMENT)
    }


def _samples(text: str) -> Iterable[tuple[str, dict[str, str], float]]:
    # A page has thousands of lines, of which few are needed.
    lines = [line for line in text.splitlines(keepends=True) if line.startswith(_READ)]
    for family in text_string_to_metric_families("".join(lines)):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


def _count_rates(counts: Counts, name: str, labels: Mapping[str, str], value: float, sides: Sides) -> None:
    model = labels.get("model")
    side = CANDIDATE if model == sides.candidate else BASELINE if model in sides.baseline else ""
    for counter, rate, label, bad, good in _RATES:
        if name != counter or not side or labels[label] not in (*bad, *good):
            continue
        _add(counts, f"{side}.{rate}.all", value)
        if labels[label] in bad:
            _add(counts, f"{side}.{rate}.bad", value)


def _count_agreement(counts: Counts, below: Mapping[float, float]) -> None:
    """Buckets of a histogram, which count all that is below their bound, as counts of their own."""
    before = 0.0
    for bound, value in sorted(below.items()):
        if not math.isinf(bound):
            _add(counts, f"{SHADOW_AGREEMENT}{bound:g}", value - before)
        before = value


def _add(counts: Counts, name: str, value: float) -> None:
    counts[name] = counts.get(name, 0.0) + value
