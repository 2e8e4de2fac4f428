"""The slice that was made slow is the one that is found."""

from __future__ import annotations

import random
import time
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.analysis import diagnose
from observability.analysis.decode import StoredSpan
from observability.analysis.diagnose import DIMENSIONS, percentile
from observability.analysis.source import StoreError
from observability.analysis.store import SpanReader, SpanStore
from observability.emit import genai, names
from observability.emit.names import Cause, TtftPart
from tests.unit.observability.planted import PARTS, request_trace, write

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


def _store(tmp_path: Path, start_ns: int, *, delays_ms: dict[Cause, float], num_plain: int = 40) -> Path:
    """Plain requests, and four of another tier that took longer for these causes."""
    path = tmp_path / "traces.sqlite"
    store = SpanStore(path, max_spans=10_000, max_bytes=1 << 30)
    for number in range(1, num_plain + 5):
        is_slow = number > num_plain
        write(
            store,
            request_trace(
                f"{start_ns}-{number}",
                number=start_ns // 10**9 + number,
                parts_ms={**PARTS, TtftPart.QUEUE: sum(delays_ms.values())} if is_slow else PARTS,
                delays_ms=delays_ms if is_slow else {},
                attributes={names.TIER: "batch" if is_slow else "gold"},
                start_ns=start_ns,
            ),
        )
    store.close()
    return path


def test_an_hour_of_the_past_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A line each, whatever the terminal is.
    monkeypatch.setenv("COLUMNS", "500")
    then_s, later_s = 1_700_000_000, 1_700_007_200
    path = _store(tmp_path, then_s * 10**9, delays_ms={Cause.KV_PRESSURE: 900.0})
    _store(tmp_path, later_s * 10**9, delays_ms={Cause.COLD_ADAPTER: 900.0})
    for unix_s, cause in ((then_s, Cause.KV_PRESSURE), (later_s, Cause.COLD_ADAPTER)):
        until = datetime.fromtimestamp(unix_s + 60, UTC).isoformat()
        assert diagnose.main(["--store", str(path), "--until", until, "--minutes", "2"]) == 0
        counted, verdict, held_back, *_ = capsys.readouterr().out.splitlines()
        assert counted.startswith("44 requests")
        assert verdict.startswith("tier batch: 9% of all requests, but 100% of the slowest")
        assert held_back == f"3 of the 3 slowest were held back by {cause}: {cause.meaning}"


@pytest.mark.parametrize("until", ["yesterday", "2026-11-23T02:25:00", ""])
def test_a_time_without_a_zone_is_refused(until: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        diagnose.main(["--until", until])
    refused = f"argument --until: {until!r} is no time with a zone; write it as 2026-11-23T02:25:00Z"
    assert refused in capsys.readouterr().err


@pytest.mark.parametrize("until", ["0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])
def test_times_that_no_store_can_count_to_hold_nothing(
    until: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _store(tmp_path, 1_700_000_000 * 10**9, delays_ms={})
    assert diagnose.main(["--store", str(path), "--until", until]) == 1
    assert capsys.readouterr().err.startswith("0 requests with a ttft in this time")


def test_what_the_tokenizer_alone_knows_is_a_cause(tmp_path: Path) -> None:
    """The gateway's span does not say that a grammar was compiled: the whole trace does."""
    path = _store(tmp_path, 1_700_000_000 * 10**9, delays_ms={})
    store = SpanStore(path, max_spans=10_000, max_bytes=1 << 30)
    parts = {**PARTS, TtftPart.PREPROCESS: 900.0}
    for number in range(1, 5):
        trace = request_trace(
            f"guided-{number}", number=number, parts_ms=parts, start_ns=1_700_000_000 * 10**9
        )
        prepare = next(span for span in trace if span.name == names.TOKENIZER_PREPARE)
        compiled = replace(
            prepare, name=str(names.TOKENIZER_COMPILE), span_id=f"{number:016x}", parent_id=prepare.span_id
        )
        write(store, [*trace, compiled])
    store.close()
    with closing(SpanReader(path)) as reader:
        found = diagnose.diagnose(reader.spans_named(names.GATEWAY_REQUEST, since_ns=0))
        told = diagnose.what_held_back(reader, found)
    assert told == f"3 of the 3 slowest were held back by grammar_compile: {Cause.GRAMMAR_COMPILE.meaning}"


def test_slow_by_their_own_work_is_said_too(tmp_path: Path) -> None:
    path = _store(tmp_path, 1_700_000_000 * 10**9, delays_ms={}, num_plain=20)
    store = SpanStore(path, max_spans=10_000, max_bytes=1 << 30)
    parts = {**PARTS, TtftPart.QUEUE: 0.0, TtftPart.PREFILL: 900.0}
    for number in range(1, 5):
        write(store, request_trace(f"long-{number}", number=number, parts_ms=parts))
    store.close()
    with closing(SpanReader(path)) as reader:
        found = diagnose.diagnose(reader.spans_named(names.GATEWAY_REQUEST, since_ns=0))
        told = diagnose.what_held_back(reader, found)
    assert told == "3 of the 3 slowest were held back by nothing: it was their own work"


def _refused(count: int, tenant: str, reason: str) -> list[StoredSpan]:
    """As the edge tells it, and of what the gateway refuses itself, its request."""
    name = names.GATEWAY_RATE_LIMIT if reason == "REQUEST_RATE_EXCEEDED" else names.GATEWAY_REQUEST
    attributes = {str(names.TENANT): tenant, str(names.OUTCOME): reason}
    now_ns = time.time_ns()
    return [
        StoredSpan(
            f"{now_ns + number:032x}",
            "b" * 16,
            "",
            names.GATEWAY,
            str(name),
            now_ns,
            now_ns + 1,
            "",
            attributes,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("num_served", [40, 2])
def test_who_was_refused_by_limits_is_told_first(
    num_served: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No latency tells of them; and where most are refused, few are left to be slow."""
    path = tmp_path / "traces.sqlite"
    store = SpanStore(path, max_spans=10_000, max_bytes=1 << 30)
    write(store, _requests(names.TIER, "gold", "gold", count=num_served))
    write(store, _refused(5, "loud", "REQUEST_RATE_EXCEEDED"))
    write(store, _refused(2, "calm", "TOKEN_RATE_EXCEEDED"))
    write(store, _refused(9, "wrong", "INVALID_ARGUMENT"))
    told = (
        "rate_limit: 7 requests were refused by their tenants' limits: "
        "5 of tenant loud (REQUEST_RATE_EXCEEDED), 2 of tenant calm (TOKEN_RATE_EXCEEDED)"
    )
    monkeypatch.setenv("COLUMNS", "300")
    is_enough = num_served >= diagnose.MIN_REQUESTS
    assert diagnose.main(["--store", str(path)]) == (0 if is_enough else 1)
    shown = capsys.readouterr()
    if is_enough:
        assert shown.out.splitlines()[1] == told
    else:
        assert shown.err == f"2 requests with a ttft in this time; 20 are needed to speak of a tail; {told}\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_percentiles_are_values_of_the_list(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
