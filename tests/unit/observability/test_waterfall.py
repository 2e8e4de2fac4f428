"""The drawing of a trace."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from observability.analysis import waterfall
from observability.analysis.decode import StoredSpan
from observability.analysis.store import SpanStore
from observability.analysis.tree import build_tree, delays_of, ttft_of, walk
from observability.emit import names
from observability.emit.names import Cause, TtftPart
from tests.unit.observability.planted import PARTS, START_NS, request_trace, write


def _drawn(spans: list[StoredSpan], width: int = 140) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(waterfall.render(spans, width))
    return output.getvalue()


def test_every_span_is_drawn_under_its_parent() -> None:
    spans = request_trace()
    lines = _drawn(spans).splitlines()
    assert "request request-1" in lines[0]
    depth = {span.name: depth for depth, span in walk(build_tree(spans))}
    assert depth[names.ENGINE_PREFILL] == depth[names.ENGINE_REQUEST] + 1 == depth[names.GATEWAY_REQUEST] + 2
    for span in spans:
        label = "envoy ingress" if span.name == names.ENVOY_INGRESS else span.name
        assert any(re.match(rf" {{{2 * depth[span.name]}}}{re.escape(label)} ", line) for line in lines)


def test_the_time_to_the_first_token_is_a_sum_that_adds_up() -> None:
    drawn = _drawn(request_trace())
    for part, milliseconds in PARTS.items():
        assert re.search(rf"{milliseconds:.2f} ms +\d+% +{part} ", drawn)
    assert re.search(rf"{sum(PARTS.values()):.2f} ms +time to the first token", drawn)
    assert "not explained" not in drawn


def test_a_sum_that_does_not_add_up_is_said_so() -> None:
    spans = request_trace(attributes={names.TTFT_MS: 150.0})
    ttft = ttft_of(spans)
    assert ttft is not None
    assert ttft.unexplained_ms == pytest.approx(50.0)
    assert re.search(r"50.00 ms +not explained", _drawn(spans))


def test_causes_are_named_in_words_the_most_expensive_first() -> None:
    spans = request_trace(delays_ms={Cause.KV_PRESSURE: 5.0, Cause.LONG_PREFILL: 15.0})
    assert list(delays_of(spans)) == [Cause.LONG_PREFILL, Cause.KV_PRESSURE]
    drawn = _drawn(spans)
    assert drawn.index("the long prompt of another request") < drawn.index("no free blocks")


def test_a_failed_request_shows_the_error_and_that_no_token_came() -> None:
    edge = request_trace()[0]
    request = replace(
        edge, span_id="f" * 16, name=str(names.GATEWAY_REQUEST), service="gateway", error="NEVER_FITS"
    )
    drawn = _drawn([edge, request])
    assert "failed: NEVER_FITS" in drawn
    assert "no token was produced" in drawn


def test_spans_without_their_parent_are_drawn_too() -> None:
    spans = [span for span in request_trace() if span.name != names.GATEWAY_REQUEST]
    assert {span.span_id for _, span in walk(build_tree(spans))} == {span.span_id for span in spans}
    assert "not (yet) here" in _drawn(spans)


@settings(deadline=None)
@given(width=st.integers(40, 250), start=st.floats(0, 1), length=st.floats(0, 1))
def test_lines_fit_and_bars_stay_inside(width: int, start: float, length: float) -> None:
    bar = waterfall._bar(start, min(1.0, start + length), width)
    assert 1 <= len(bar) <= width + 1
    assert bar.strip()


@pytest.mark.parametrize("width", [40, 60, 80, 99, 100, 140, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    table_lines = _drawn(request_trace(), width).split("TTFT")[0].splitlines()
    assert all(len(line) <= width for line in table_lines)


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "observability.analysis.waterfall", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_works_piped_and_its_errors_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    missing = _run("--store", str(path), "last")
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "no span store" in missing.stderr
    store = SpanStore(path, max_spans=1000, max_bytes=1 << 30)
    write(store, request_trace("r-1", parts_ms={**PARTS, TtftPart.QUEUE: 500.0}))
    found = _run("--store", str(path), "r-1")
    assert found.returncode == 0
    assert "\x1b" not in found.stdout
    assert "engine.prefill" in found.stdout
    assert _run("--store", str(path), "r-2").returncode == 1


def test_last_waits_until_every_service_has_told_of_the_request_that_was_sent(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    store = SpanStore(path, max_spans=1000, max_bytes=1 << 30)
    write(store, request_trace("r-before", number=1))
    asking = subprocess.Popen(
        [sys.executable, "-m", "observability.analysis.waterfall", "--store", path, "--after", "r-2", "last"],
        stdout=subprocess.PIPE,
        text=True,
    )
    spans = request_trace("r-2", number=2, start_ns=START_NS + 10**9)
    late = [span for span in spans if span.service == names.ENGINE]
    write(store, [span for span in spans if span.service != names.ENGINE])
    with pytest.raises(subprocess.TimeoutExpired):
        asking.wait(timeout=2)
    write(store, late)
    shown, _ = asking.communicate(timeout=60)
    assert "r-2" in shown
    assert "engine.prefill" in shown
