"""Readings of a deployment's processes from its Prometheus, by the HTTP API (`/api/v1/query`)."""

from __future__ import annotations

import time
from collections import defaultdict

import httpx

from observability.analysis.scrape import Interval, Labels, Reading
from observability.analysis.source import StoreError
from observability.emit import names

_TIMEOUT_S = 30.0
_OURS = '{__name__=~"millrace_.+"}'
# Labels by which Prometheus tells processes apart, and which are no labels of ours.
_OF_PROCESS = ("job", "instance")


class PrometheusReader:
    """Reads one Prometheus, named by its address."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def intervals(self, seconds: float) -> dict[str, Interval]:
        """What happened in the last so many seconds, by process: "gateway 10.0.0.7:9464". A process that is
        younger counts from zero. Raises StoreError when there is no answer.
        """
        now = time.time()
        before, after = self._readings(now - seconds), self._readings(now)
        if not after:
            raise StoreError(
                f"the Prometheus at {self._url} knows no metric of ours; does it scrape Millrace?"
            )
        return {
            name: Interval(before.get(name, Reading(now - seconds)), reading)
            for name, reading in sorted(after.items())
        }

    def _readings(self, unix_s: float) -> dict[str, Reading]:
        try:
            answer = self._client.get("/api/v1/query", params={"query": _OURS, "time": f"{unix_s:.3f}"})
            answer.raise_for_status()
            series = answer.json()["data"]["result"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise StoreError(
                f"the Prometheus at {self._url} does not answer ({error}); name it as http://127.0.0.1:9090"
            ) from error
        samples: dict[tuple[str, str], dict[tuple[str, Labels], float]] = defaultdict(dict)
        services: dict[tuple[str, str], str] = {}
        for each in series:
            labels: dict[str, str] = each["metric"]
            job, instance = (labels.pop(name, "") for name in _OF_PROCESS)
            metric = labels.pop("__name__")
            if metric == names.BUILD_INFO.name:
                # An operator's ServiceMonitor has a label of that name, too.
                services[job, instance] = labels.get("exported_service") or labels["service"]
            samples[job, instance][metric, tuple(sorted(labels.items()))] = float(each["value"][1])
        return {
            f"{services.get(process, process[0])} {process[1]}": Reading(unix_s, found)
            for process, found in samples.items()
        }
