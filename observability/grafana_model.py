"""Pages, graphs and queries of Grafana: the PromQL they ask and the JSON they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from observability.names import Metric

_PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}
_WIDTH = 24
_PANEL_WIDTH, _PANEL_HEIGHT = 8, 8


@dataclass(frozen=True)
class Query:
    """One PromQL expression with the legend of its series."""

    expression: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is Grafana's name of it; `thresholds` turn the graph red from the last value on."""

    title: str
    unit: str
    queries: Sequence[Query]
    description: str = ""
    kind: str = "timeseries"
    threshold: float | None = None


@dataclass(frozen=True)
class Dashboard:
    """One page. `variables` are labels to choose from, with the metric that has them."""

    uid: str
    title: str
    rows: Sequence[tuple[str, Sequence[Panel]]]
    variables: Sequence[tuple[str, Metric]] = ()


def rate(metric: Metric, by: str = "", where: str = "") -> str:
    """Increase per second of a counter, summed by labels."""
    return f"sum{_by(by)} (rate({metric.name}{_where(where)}[$__rate_interval]))"


def quantile(share: float, metric: Metric, by: str = "", where: str = "") -> str:
    """Quantile of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    rates = f"rate({metric.name}_bucket{_where(where)}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by ({labels}) ({rates}))"


def mean(metric: Metric, by: str = "", where: str = "") -> str:
    """Mean of a histogram's observations."""
    total, count = (
        f"rate({metric.name}_{part}{_where(where)}[$__rate_interval])" for part in ("sum", "count")
    )
    return f"sum{_by(by)} ({total}) / sum{_by(by)} ({count})"


def gauge(metric: Metric, by: str = "", function: str = "sum", where: str = "") -> str:
    """A gauge over all instances."""
    return f"{function}{_by(by)} ({metric.name}{_where(where)})"


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""


def _where(condition: str) -> str:
    return f"{{{condition}}}" if condition else ""


def to_json(dashboard: Dashboard) -> str:
    """Grafana's JSON model of a page."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "gridPos": _position(0, y, _WIDTH, 1),
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row):
            x = _PANEL_WIDTH * index % _WIDTH
            top = y + _PANEL_HEIGHT * (_PANEL_WIDTH * index // _WIDTH)
            panels.append(_panel(panel, len(panels) + 1, x, top))
        y += _PANEL_HEIGHT * -(-len(row) * _PANEL_WIDTH // _WIDTH)
    model = {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["millrace"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_variable(label, metric) for label, metric in dashboard.variables]},
        "links": [{"type": "dashboards", "tags": ["millrace"], "asDropdown": True, "title": "Millrace"}],
        "panels": panels,
    }
    return json.dumps(model, indent=1) + "\n"


def _panel(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.threshold is not None:
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": "green", "value": None}, {"color": "red", "value": panel.threshold}],
        }
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    if panel.title.startswith("Error budget"):
        # It can be overdrawn.
        del defaults["min"]
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": _PROMETHEUS,
            "expr": query.expression,
            "legendFormat": query.legend or "__auto",
            "exemplar": "_bucket" in query.expression,
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _PROMETHEUS,
        "gridPos": _position(x, y, _PANEL_WIDTH, _PANEL_HEIGHT),
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": targets,
    }


def _position(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


def _variable(label: str, metric: Metric) -> dict[str, Any]:
    return {
        "name": label,
        "type": "query",
        "datasource": _PROMETHEUS,
        "query": f"label_values({metric.name}, {label})",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
