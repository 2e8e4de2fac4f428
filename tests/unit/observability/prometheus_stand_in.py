"""Answers as Prometheus does to instant queries (`GET /api/v1/query`), from readings of processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from urllib.parse import SplitResult, parse_qs

from observability.analysis.scrape import Reading
from tests.unit.observability.stand_in_server import serving

# The readings of each instance at a moment, in Unix seconds.
Said = Callable[[float], Mapping[str, Reading]]


def _result(said: Said, unix_s: float) -> list[dict[str, object]]:
    return [
        {
            "metric": {"__name__": name, "job": "pods", "instance": instance, **dict(labels)},
            "value": [unix_s, str(value)],
        }
        for instance, reading in said(unix_s).items()
        for (name, labels), value in reading.samples.items()
    ]


def prometheus(said: Said) -> AbstractContextManager[str]:
    """The address of one whose targets said this."""

    def answer(url: SplitResult) -> tuple[int, bytes]:
        assert url.path == "/api/v1/query"
        asked = parse_qs(url.query)
        assert asked["query"] == ['{__name__=~"millrace_.+"}']
        found = _result(said, float(asked["time"][0]))
        body = {"status": "success", "data": {"resultType": "vector", "result": found}}
        return 200, json.dumps(body).encode()

    return serving(answer)
