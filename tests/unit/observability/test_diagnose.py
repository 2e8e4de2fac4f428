"""The slice that was made slow is the one that is found."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.analysis import diagnose
from observability.analysis.decode import StoredSpan
from observability.analysis.diagnose import DIMENSIONS, percentile
from observability.analysis.source import StoreError
from observability.analysis.store import SpanStore
from observability.emit import genai, names
from tests.unit.observability.planted import request_trace, write

# One value that is slow, and one that is not, for every dimension that requests carry.
PLANTED: dict[str, tuple[str, Any, Any, str]] = {
    "tenant": (names.TENANT, "loud", "calm", "loud"),
    "tier": (names.TIER, "batch", "gold", "batch"),
    "model": (genai.REQUEST_MODEL, "large", "small", "large"),
    "revision": (names.REVISION, "2", "1", "2"),
    "face": (names.FACE, "grpc", "http", "grpc"),
    "streaming": (names.STREAMING, True, False, "True"),
    "engine": (names.ENGINE_ID, "e1", "e0", "e1"),
    "pool": (names.POOL, "long", "short", "long"),
    "adapter": (names.ADAPTER, "cold", "", "cold"),
    "prompt length": (genai.INPUT_TOKENS, 9_000, 50, "<=32768"),
    "output length": (genai.OUTPUT_TOKENS, 600, 50, "<=2048"),
    "prefix cache": (names.CACHED_TOKENS, 0, 64, "miss"),
    "guided": (names.GUIDED, "json_schema", "", "json_schema"),
    "speculative": (names.SPECULATIVE, "false", "true", "false"),
    "delayed by": (names.DELAYED_BY, ["kv_pressure", "offload"], [], "kv_pressure"),
    "outcome": (names.OUTCOME, "length", "stop", "length"),
}


def _requests(key: str, slow: Any, fast: Any, count: int = 400) -> list[StoredSpan]:
    chance = random.Random(7)
    spans = []
    for number in range(count):
        is_slow = chance.random() < 0.08
        attributes = {
            names.TTFT_MS: chance.uniform(800, 1200) if is_slow else chance.uniform(50, 150),
            key: slow if is_slow else fast,
        }
        trace = request_trace(
            f"r-{number}", number=number + 1, attributes=attributes, start_ns=time.time_ns()
        )
        spans.append(next(span for span in trace if span.name == names.GATEWAY_REQUEST))
    return spans


def test_short_answers_are_told_apart() -> None:
    found = diagnose.diagnose(_requests(genai.OUTPUT_TOKENS, 120, 8))
    assert (found.slices[0].dimension, found.slices[0].value) == ("output length", "<=128")


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_the_planted_slice_explains_the_tail(dimension: str) -> None:
    key, slow, fast, value = PLANTED[dimension]
    found = diagnose.diagnose(_requests(key, slow, fast))
    assert (found.slices[0].dimension, found.slices[0].value) == (dimension, value)
    assert found.slices[0].p95_ms > 800
    assert found.slices[0].p95_elsewhere_ms <= 150
    assert f"{dimension} {value}" in found.verdict


def test_a_tail_like_everything_else_blames_nobody() -> None:
    chance = random.Random(3)
    spans = []
    for number in range(400):
        attributes: dict[str, Any] = {
            names.TTFT_MS: chance.expovariate(0.01),
            names.TENANT: chance.choice("abcd"),
        }
        trace = request_trace(number=number + 1, attributes=attributes)
        spans.append(next(span for span in trace if span.name == names.GATEWAY_REQUEST))
    assert diagnose.diagnose(spans).slices == []


def test_too_few_requests_are_not_judged() -> None:
    with pytest.raises(StoreError, match="20 are needed"):
        diagnose.diagnose(_requests(names.TIER, "a", "b", count=19))


def test_the_command_looks_at_the_last_hour_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.sqlite"
    store = SpanStore(path, max_spans=10_000, max_bytes=1 << 30)
    old = time.time_ns() - 2 * 3600 * 10**9
    for number in range(30):
        write(store, request_trace(f"old-{number}", number=number + 1, start_ns=old))
    assert diagnose.main(["--store", str(path)]) == 1
    assert "0 requests" in capsys.readouterr().err
    assert diagnose.main(["--store", str(path), "--minutes", "180"]) == 0
    write(store, _requests(names.TENANT, "loud", "calm"))
    assert diagnose.main(["--store", str(path), "--metric", "ttft"]) == 0
    assert "tenant loud" in capsys.readouterr().out.replace("\n", " ")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_values_of_the_list(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
