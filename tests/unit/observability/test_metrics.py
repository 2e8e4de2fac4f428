"""Metrics as Prometheus scrapes them."""

from __future__ import annotations

import threading
import urllib.request
from contextlib import closing

import pytest
from opentelemetry.trace import SpanContext, TraceFlags
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from observability.emit import names
from observability.emit.metrics import OTHER, Metrics
from runtime.errors import ConfigError

_OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_each_declared_metric_can_be_written_and_parsed() -> None:
    metrics = Metrics()
    for metric in names.METRICS.values():
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind == "counter":
            metrics.add(metric, 2, **labels)
        elif metric.kind == "gauge":
            metrics.set(metric, 2, **labels)
        else:
            metrics.observe(metric, 2, **labels)
    for accept, parse in (("", parse_text), (_OPENMETRICS, parse_openmetrics)):
        body, content_type = metrics.expose(accept)
        samples = {sample.name for family in parse(body.decode()) for sample in family.samples}
        assert ("openmetrics" in content_type) == bool(accept)
        for metric in names.METRICS.values():
            suffix = "_bucket" if metric.kind == "histogram" else ""
            assert metric.name + suffix in samples


def test_tenants_beyond_the_bound_share_one_label_value() -> None:
    metrics = Metrics(max_label_values=2)
    for tenant in ("a", "b", "c", "d", "a"):
        metrics.add(names.COST, 1, tier="t", tenant=tenant)
    assert _value(metrics, names.COST.name, tier="t", tenant="a") == 2
    assert _value(metrics, names.COST.name, tier="t", tenant=OTHER) == 2
    assert _value(metrics, names.COST.name, tier="t", tenant="c") is None


def test_combinations_beyond_the_bound_are_kept_without_the_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.emit.metrics._MAX_COMBINATIONS", 3)
    metrics = Metrics()
    for tier in ("s", "t"):
        for tenant in ("a", "b", "c", "a"):
            metrics.add(names.COST, 1, tier=tier, tenant=tenant)
    assert _value(metrics, names.COST.name, tier="s", tenant="a") == 2
    assert _value(metrics, names.COST.name, tier="t", tenant="a") is None
    assert _value(metrics, names.COST.name, tier="t", tenant=OTHER) == 4


def test_counters_exist_at_0_with_every_value_that_is_declared() -> None:
    """Prometheus does not see the first event of a series that begins with it."""
    metrics = Metrics()
    metrics.begin(names.RESUBMISSIONS)
    assert [_value(metrics, names.RESUBMISSIONS.name, outcome=each) for each in ("continued", "failed")] == [
        0,
        0,
    ]
    metrics.add(names.SLO, tier="t", tenant="a", objective="ttft", met="true")
    labels = {"tier": "t", "tenant": "a", "objective": "ttft"}
    assert [_value(metrics, names.SLO.name, **labels, met=each) for each in ("true", "false")] == [1, 0]
    metrics.begin(names.SLO, **labels)
    assert _value(metrics, names.SLO.name, **labels, met="true") == 1


def test_what_exists_at_0_is_bounded_as_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("observability.emit.metrics._MAX_COMBINATIONS", 4)
    metrics = Metrics(max_label_values=3)
    labels = {"tier": "t", "objective": "ttft"}
    for tenant in "abcd":
        metrics.add(names.SLO, **labels, tenant=tenant, met="false")
    samples = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == names.SLO.name
    ]
    found = {(sample.labels["tenant"], sample.labels["met"]): sample.value for sample in samples}
    # Two tenants fill the combinations, each with both values; what is beyond has both as well.
    assert found == {
        ("a", "false"): 1,
        ("a", "true"): 0,
        ("b", "false"): 1,
        ("b", "true"): 0,
        (OTHER, "false"): 2,
        (OTHER, "true"): 0,
    }


def test_a_sampled_span_becomes_the_exemplar() -> None:
    metrics = Metrics()
    span = SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    metrics.observe(names.PREPARE_SECONDS, 0.02, span=span)
    metrics.observe(names.AUTHORIZE_SECONDS, 0.02)
    exemplars = {
        sample.name: sample.exemplar
        for family in parse_openmetrics(metrics.expose(_OPENMETRICS)[0].decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert exemplars.keys() == {f"{names.PREPARE_SECONDS.name}_bucket"}
    assert exemplars[f"{names.PREPARE_SECONDS.name}_bucket"].labels == {"trace_id": f"{0xABC:032x}"}


def test_wrong_labels_and_kinds_are_refused() -> None:
    metrics = Metrics()
    with pytest.raises(ValueError):
        metrics.add(names.COST, 1, tier="t")
    with pytest.raises(ValueError):
        metrics.add(names.COST, 1, tier="t", tenant="a", more="x")
    with pytest.raises(AssertionError):
        metrics.set(names.COST, 1, tier="t", tenant="a")


def test_a_removed_value_is_no_longer_exposed() -> None:
    metrics = Metrics()
    metrics.set(names.EXPECTED_WAIT, 3, tier="a")
    metrics.set(names.EXPECTED_WAIT, 4, tier="b")
    metrics.remove(names.EXPECTED_WAIT, tier="a")
    assert _value(metrics, names.EXPECTED_WAIT.name, tier="a") is None
    assert _value(metrics, names.EXPECTED_WAIT.name, tier="b") == 4


def test_gauges_can_be_read_at_scrape_time() -> None:
    metrics = Metrics()
    waiting = [1, 2, 3]
    metrics.set_function(names.REQUESTS_WAITING, lambda: len(waiting))
    waiting.append(4)
    assert _value(metrics, names.REQUESTS_WAITING.name) == 4


def test_the_endpoint_serves_and_closes() -> None:
    metrics = Metrics()
    metrics.set(names.BUILD_INFO, 1, service="gateway", version="1.0", model="nano")
    address = metrics.serve("127.0.0.1:0", "gateway.metrics_listen")
    with closing(metrics):
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            assert b'millrace_build_info{model="nano",service="gateway",version="1.0"} 1.0' in response.read()
        with pytest.raises(ConfigError, match=r"gateway\.metrics_listen"):
            Metrics().serve(address, "gateway.metrics_listen")


def test_values_that_come_with_every_token_are_those_of_their_series() -> None:
    metrics = Metrics()
    observe = metrics.observer(names.ITL, model="m", tier="t")
    for value in (0.0, *names.ITL.buckets, 1e6):
        observe(value)
    metrics.observe(names.ITL, 0.5, tier="t", model="m")
    labels = {"model": "m", "tier": "t"}
    for number, bound in enumerate(names.ITL.buckets, 2):
        found = _value(metrics, f"{names.ITL.name}_bucket", le=str(bound), **labels)
        assert found == number + (bound >= 0.5)
    assert _value(metrics, f"{names.ITL.name}_count", **labels) == len(names.ITL.buckets) + 3
    assert _value(metrics, f"{names.ITL.name}_sum", **labels) == pytest.approx(
        sum(names.ITL.buckets) + 1e6 + 0.5
    )


def test_nothing_is_lost_while_threads_count_and_others_look() -> None:
    metrics = Metrics()
    num_threads, num_each = 4, 5000

    def count() -> None:
        for _ in range(num_each):
            metrics.add(names.COST, 1, tier="t", tenant="a")
            metrics.observe(names.PREPARE_SECONDS, 0.02)

    threads = [threading.Thread(target=count) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(_value(metrics, names.COST.name, tier="t", tenant="a") or 0)
    assert seen == sorted(seen)
    assert _value(metrics, names.COST.name, tier="t", tenant="a") == num_threads * num_each
    assert _value(metrics, f"{names.PREPARE_SECONDS.name}_count") == num_threads * num_each


def test_one_name_alone_can_be_scraped_and_is_up_to_date() -> None:
    metrics = Metrics()
    metrics.add(names.COST, 3, tier="t", tenant="a")
    address = metrics.serve("127.0.0.1:0", "gateway.metrics_listen")
    with closing(metrics):
        url = f"http://{address}/metrics?name[]={names.COST.name}"
        with urllib.request.urlopen(url, timeout=10) as response:
            assert b'{tenant="a",tier="t"} 3.0' in response.read()


def test_a_counter_does_not_go_down() -> None:
    with pytest.raises(ValueError):
        Metrics().add(names.COST, -1, tier="t", tenant="a")
