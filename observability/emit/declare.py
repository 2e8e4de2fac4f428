"""How spans, attributes and metrics are declared, and the tables of all that are: modules beside this one
declare them, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NewType, TypeAlias

# Plain strings at run time: encoders are fast for those.
SpanName = NewType("SpanName", str)
Attribute = NewType("Attribute", str)
# Meanings of all declared spans and attributes, by name.
SPANS: dict[str, str] = {}
ATTRIBUTES: dict[str, str] = {}


def span(name: str, meaning: str) -> SpanName:
    """Declares a span; ours begin with the service that makes them."""
    SPANS[name] = meaning
    return SpanName(name)


def attribute(key: str, unit: str, meaning: str) -> Attribute:
    """Declares a span attribute. `unit` is "" for text, else the number's (UCUM-like: ms, s, {token})."""
    ATTRIBUTES[key] = f"{meaning} [{unit}]" if unit else meaning
    return Attribute(key)


Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Metric:
    """One metric family as Prometheus sees it. `name` is the exposed name, suffixes included; `values` are
    those of labels that have no others.
    """

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)


METRICS: dict[str, Metric] = {}


def _metric(kind: Kind, series: str, unit: str, meaning: str, buckets: tuple[float, ...] = ()) -> Metric:
    """Declares a metric; `series` is its name and its labels as Prometheus writes them, name{label,label}, a
    label with all its values where they are known: name{label=one|other}.
    """
    name, _, listed = series.rstrip("}").partition("{")
    pairs = [each.partition("=")[::2] for each in listed.split(",")] if listed else []
    values = {label: tuple(known.split("|")) for label, known in pairs if known}
    if name in METRICS:
        raise ValueError(f"{name} is declared twice")
    if (kind == "counter") != name.endswith("_total"):
        raise ValueError(f"{name}: counters, and only counters, end in _total")
    if (kind == "histogram") != bool(buckets):
        raise ValueError(f"{name}: histograms, and only histograms, have buckets")
    METRICS[name] = Metric(name, kind, unit, meaning, tuple(label for label, _ in pairs), buckets, values)
    return METRICS[name]


counter, gauge = partial(_metric, "counter"), partial(_metric, "gauge")
histogram = partial(_metric, "histogram")
