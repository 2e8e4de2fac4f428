"""Dashboards and alerts ask for metrics that exist, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from observability.emit import experts, names, retention
from observability.emit.names import Metric

ROOT = Path(__file__).resolve().parents[3]
GRAFANA = ROOT / "observability/grafana"
ALERTS = ROOT / "observability/prometheus/alerts.yml"
_SUFFIXES = ("", "_bucket", "_sum", "_count")
# With those that are declared in files of their own.
METRICS = {**names.METRICS, **{each.name: each for each in (retention.KV_LOST, *experts.ALL)}}
# Labels that Prometheus adds.
_SCRAPE_LABELS = {"instance", "job", "le"}


def _panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted((GRAFANA / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] != "row":
                yield path.stem, panel


def _rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def _expressions() -> list[str]:
    found = [target["expr"] for _, panel in _panels() for target in panel["targets"]]
    return found + [rule["expr"] for rule in _rules()]


def _metrics(expression: str) -> list[tuple[str, str]]:
    """(name, label conditions) of every metric of ours in the expression."""
    return re.findall(r"\b(millrace_\w+)(\{[^}]*\})?", expression)


def _declared(name: str) -> Metric:
    for suffix in _SUFFIXES:
        metric = METRICS.get(name.removesuffix(suffix) if suffix else name)
        if metric is not None and (not suffix or metric.kind == "histogram") == (
            bool(suffix) or metric.kind != "histogram"
        ):
            return metric
    raise AssertionError(f"{name} is not declared in names.py")


def test_pages_keep_their_addresses_and_panels_their_numbers() -> None:
    """Links, and what Grafana keeps of a panel, go by these."""
    for path in (GRAFANA / "dashboards").iterdir():
        page = json.loads(path.read_text())
        assert page["uid"] == path.stem
        numbers = [panel["id"] for panel in page["panels"]]
        assert len(numbers) == len(set(numbers))
        # The label of each choice is one that the metric behind it has.
        for variable in page["templating"]["list"]:
            name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()
            assert label in {*_declared(name).labels, *_SCRAPE_LABELS}


@pytest.mark.parametrize("expression", _expressions())
def test_every_metric_exists_and_has_the_labels_that_are_asked_for(expression: str) -> None:
    found = _metrics(expression)
    recorded = re.findall(r"millrace:[\w:]+", expression)
    assert found or recorded or expression.startswith("up{"), expression
    for name, conditions in found:
        metric = _declared(name)
        labels = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", conditions))
        assert labels <= {*metric.labels, *_SCRAPE_LABELS}, f"{name}: {labels}"
        for grouping in re.findall(r"by \(([^)]*)\)", expression):
            # Groupings of expressions over several metrics hold for each of them.
            assert set(re.split(r",\s*", grouping)) <= {*metric.labels, *_SCRAPE_LABELS}, expression
    records = {rule["record"] for rule in _rules() if "record" in rule}
    assert set(recorded) <= records


def test_expressions_are_balanced_and_do_not_rate_gauges() -> None:
    for expression in _expressions():
        for opening, closing in ("()", "{}", "[]"):
            assert expression.count(opening) == expression.count(closing), expression
        for name in re.findall(r"(?:rate|increase)\((\w+)", expression):
            assert _declared(name).kind != "gauge", expression


def test_panels_do_not_overlap() -> None:
    taken: dict[str, set[tuple[int, int]]] = {}
    for page, panel in _panels():
        position = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(position["x"], position["x"] + position["w"])
            for y in range(position["y"], position["y"] + position["h"])
        }
        assert position["x"] + position["w"] <= 24
        assert not cells & taken.setdefault(page, set()), panel["title"]
        taken[page] |= cells


def test_data_sources_and_providers_fit_the_dashboards() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/millrace.yaml").read_text())["datasources"]
    uids = {source["uid"] for source in sources}
    for _, panel in _panels():
        assert panel["datasource"]["uid"] in uids
    (exemplars,) = sources[0]["jsonData"]["exemplarTraceIdDestinations"]
    assert exemplars["datasourceUid"] in uids
    providers = yaml.safe_load((GRAFANA / "provisioning/dashboards/millrace.yaml").read_text())["providers"]
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    mounts = [volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"]]
    assert ["./observability/grafana/dashboards", providers[0]["options"]["path"]] in mounts


def test_alerts_say_what_to_do() -> None:
    guide = (ROOT / "docs/operations.md").read_text()
    anchors = {heading.strip().lower() for heading in re.findall(r"^#+ (.+)$", guide, re.MULTILINE)}
    for rule in _rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in {"page", "ticket"}
            page, _, anchor = rule["annotations"]["runbook"].partition("#")
            assert page == "docs/operations.md"
            assert anchor == rule["alert"].lower()
            assert anchor in anchors, f"docs/operations.md says nothing of {rule['alert']}"


def test_a_counter_that_an_alert_asks_for_by_value_has_the_value_declared() -> None:
    """So that its series exists at 0 before the first event, which a rate would miss otherwise."""
    counters = [
        (name, label, value)
        for rule in _rules()
        for name, conditions in _metrics(rule["expr"])
        for label, value in re.findall(r'(\w+)="(\w+)"', conditions)
        if _declared(name).kind == "counter"
    ]
    assert counters
    for name, label, value in counters:
        assert value in _declared(name).values.get(label, ()), name
