"""Rates and percentiles from two readings, and the live view over real endpoints."""

from __future__ import annotations

import io
import math
import time
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from observability.analysis import top
from observability.analysis.scrape import Interval, Reading, parse, scrape
from observability.emit import names
from observability.emit.metrics import Metrics
from tests.unit.observability.prometheus_stand_in import prometheus


def _reading(metrics: Metrics, at_s: float) -> Reading:
    return parse(metrics.expose()[0].decode(), at_s)


def test_rates_are_differences_over_time_and_survive_a_restart() -> None:
    metrics = Metrics()
    metrics.add(names.RECOMPUTED, 100)
    before = _reading(metrics, 10.0)
    metrics.add(names.RECOMPUTED, 50)
    assert Interval(before, _reading(metrics, 15.0)).rate(names.RECOMPUTED) == 10.0
    restarted = Metrics()
    restarted.add(names.RECOMPUTED, 20)
    assert Interval(before, _reading(restarted, 20.0)).rate(names.RECOMPUTED) == 2.0


@settings(deadline=None)
@given(st.lists(st.floats(0.0, 70.0), min_size=1, max_size=40), st.sampled_from([0.5, 0.95]))
def test_percentiles_lie_in_the_bucket_of_the_true_one(values: list[float], share: float) -> None:
    metrics = Metrics()
    metrics.observe(names.QUEUE_SECONDS, 3.0, tier="a")
    before = _reading(metrics, 0.0)
    for value in values:
        metrics.observe(names.QUEUE_SECONDS, value, tier="a")
    found = Interval(before, _reading(metrics, 1.0)).percentile(names.QUEUE_SECONDS, share, tier="a")
    assert found is not None
    ordered = sorted(values)
    true = ordered[math.ceil(share * len(values)) - 1]
    bounds = [*names.QUEUE_SECONDS.buckets, math.inf]
    lower = max([0.0, *(bound for bound in bounds if bound < true)])
    upper = min(bound for bound in bounds if bound >= true)
    assert lower <= found <= upper


def test_a_histogram_without_observations_has_no_percentile() -> None:
    metrics = Metrics()
    metrics.observe(names.QUEUE_SECONDS, 3.0, tier="a")
    reading = _reading(metrics, 0.0)
    assert Interval(reading, reading).percentile(names.QUEUE_SECONDS, 0.5) is None
    assert Interval(reading, reading).percentile(names.TTFT, 0.5) is None


async def test_endpoints_are_read_and_a_missing_one_is_named() -> None:
    metrics = Metrics()
    metrics.set(names.KV_USAGE, 0.97)
    metrics.set(names.REQUESTS_WAITING, 7)
    address = metrics.serve("127.0.0.1:0", "gateway.metrics_listen")
    with closing(metrics):
        readings = await scrape({"engine-0": address, "engine-1": "127.0.0.1:1"})
    assert readings["engine-0"].value(names.KV_USAGE) == 0.97
    assert readings["engine-1"].error
    output = io.StringIO()
    view = top.render({name: Interval(reading, reading) for name, reading in readings.items()})
    Console(file=output, width=140).print(view)
    assert "97" in output.getvalue()
    assert "no answer from engine-1" in output.getvalue()


def test_tiers_show_their_promises() -> None:
    metrics = Metrics()
    metrics.set(names.ACTIVE_STREAMS, 0, tier="gold")
    before = _reading(metrics, 0.0)
    labels = {"tenant": "acme", "objective": "ttft"}
    for met in ("true", "true", "true", "false"):
        metrics.add(names.SLO, tier="gold", met=met, **labels)
    metrics.set(names.ACTIVE_STREAMS, 5, tier="gold")
    output = io.StringIO()
    Console(file=output, width=140).print(top.render({"gateway-0": Interval(before, _reading(metrics, 1.0))}))
    (line,) = [line for line in output.getvalue().splitlines() if line.startswith("gold")]
    assert line.split() == ["gold", "5", "-", "-", "-", "75", "0.0"]


@pytest.mark.parametrize("target", ["engine", "engine=", "=127.0.0.1:1", "engine=host:port"])
def test_bad_targets_are_named(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--target", target]) == 2
    assert "expected NAME=HOST:PORT" in capsys.readouterr().err


def test_once_prints_one_view(capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics()
    metrics.set(names.REQUESTS_RUNNING, 3)
    address = metrics.serve("127.0.0.1:0", "gateway.metrics_listen")
    with closing(metrics):
        assert top.main(["--target", f"engine-0={address}", "--once", "--interval", "0.05"]) == 0
    shown = capsys.readouterr().out
    assert "engine-0" in shown
    assert shown.endswith("\n")


@pytest.mark.parametrize("columns", ["80", "140"])
def test_a_deployments_prometheus_shows_the_last_minute(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    gateway, later, engine = Metrics(), Metrics(), Metrics()
    of = {"face": "http", "model": "m", "revision": "", "tier": "gold", "tenant": "t", "outcome": "ok"}
    for metrics, count in ((gateway, 60), (later, 180)):
        metrics.set(names.BUILD_INFO, 1, service=names.GATEWAY, version="1", model="m")
        metrics.add(names.REQUESTS, count, **of)
    engine.set(names.BUILD_INFO, 1, service=names.ENGINE, version="1", model="m")
    engine.set(names.REQUESTS_RUNNING, 17)
    earlier = {"10.0.0.1:9464": gateway}
    now = {"10.0.0.1:9464": later, "10.0.0.2:9464": engine}
    changed_s = time.time() - 1.0

    def said(unix_s: float) -> dict[str, Reading]:
        found = now if unix_s >= changed_s else earlier
        return {instance: _reading(metrics, unix_s) for instance, metrics in found.items()}

    with prometheus(said) as url:
        assert top.main(["--prometheus", url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("2.0 requests/s")
    (line,) = [line for line in shown.splitlines() if line.startswith("engine 10.0.0.2:9464")]
    assert line.split()[2] == "17"
    assert top.main(["--prometheus", url, "--once"]) == 1
    assert capsys.readouterr().err.startswith(f"the Prometheus at {url} does not answer")
