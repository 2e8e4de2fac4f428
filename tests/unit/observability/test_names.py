"""The declarations hold together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from opentelemetry.util.types import AttributeValue

from observability.emit import genai, names


def test_metric_names_follow_prometheus_conventions() -> None:
    for metric in names.METRICS.values():
        assert re.fullmatch(r"(millrace|gen_ai_server)_[a-z0-9_]+", metric.name), metric.name
        assert metric.meaning.endswith("."), metric.name
        if metric.kind == "histogram":
            assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name
        if metric.unit == "s" and metric.kind == "histogram":
            assert metric.name.endswith("_seconds"), metric.name


def test_every_part_and_cause_has_an_attribute_and_a_meaning() -> None:
    assert set(names.TTFT_PARTS) == set(names.TtftPart)
    assert set(names.DELAYED_BY_MS) == set(names.Cause)
    assert all(each.meaning for each in (*names.TtftPart, *names.Cause))


def test_a_metric_cannot_be_declared_twice_or_with_the_wrong_suffix() -> None:
    with pytest.raises(ValueError, match="declared twice"):
        names.gauge(names.TTFT.name, "s", "Again.")
    with pytest.raises(ValueError, match="_total"):
        names.counter("millrace_wrong", "1", "No suffix.")
    with pytest.raises(ValueError, match="buckets"):
        names.histogram("millrace_wrong_seconds", "s", "No buckets.")


def test_the_endpoint_picker_finds_gauges_without_labels() -> None:
    for need in ("TotalQueuedRequests", "TotalRunningRequests", "KVCacheUtilization"):
        metric = names.INFERENCE_EXTENSION[need]
        assert metric.kind == "gauge"
        assert metric.labels == ()
    assert set(names.INFERENCE_EXTENSION["LoraInfo"].labels) == {
        "max_lora",
        "running_lora_adapters",
        "waiting_lora_adapters",
    }


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(0, "<=128"), (128, "<=128"), (129, "<=512"), (32_768, "<=32768"), (32_769, ">32768")],
)
def test_length_buckets(length: int, bucket: str) -> None:
    assert names.length_bucket(length) == bucket


def test_genai_attributes_in_each_generation() -> None:
    asked: dict[names.Attribute, AttributeValue | None] = {
        genai.SYSTEM: "millrace",
        genai.PROVIDER_NAME: "millrace",
        genai.INPUT_TOKENS: 7,
        genai.OUTPUT_TOKENS: 0,
        genai.CACHED_TOKENS: 3,
        genai.TEMPERATURE: None,
        genai.SERVICE_TIER: "",
    }
    old, new = genai.of_generation(asked, "v1.36"), genai.of_generation(asked, "latest")
    common = {genai.INPUT_TOKENS: 7, genai.OUTPUT_TOKENS: 0}
    assert old == {genai.SYSTEM: "millrace", **common}
    # Attributes without a value are left out, not invented.
    assert new == {genai.PROVIDER_NAME: "millrace", genai.CACHED_TOKENS: 3, **common}
    assert genai.of_generation(asked, "both") == old | new


def test_genai_keys_are_those_of_the_published_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, openai_attributes

    published = {
        value
        for module in (gen_ai_attributes, openai_attributes)
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }
    ours = {key for key in names.ATTRIBUTES if key.startswith(("gen_ai.", "openai."))}
    assert ours <= published


def test_every_declared_name_is_emitted_or_said_to_be_anothers() -> None:
    """A metric or span that nothing writes would be a promise on a dashboard that is never kept."""
    root = Path(__file__).resolve().parents[3]
    readers = {
        "names.py",
        "top.py",
        "causes.py",
        "why.py",
        "diagnose.py",
        "tree.py",
        "waterfall.py",
    }
    sources = [
        path.read_text()
        for package in ("gateway", "tokenizer_svc", "engine", "observability")
        for path in (root / package).rglob("*.py")
        if not (package == "observability" and path.name in readers)
    ]
    text = "\n".join(sources)
    for constant, value in vars(names).items():
        if isinstance(value, names.Metric) or (isinstance(value, str) and value in names.SPANS):
            assert re.search(rf"\bnames\.{constant}\b", text), f"nothing emits names.{constant}"
