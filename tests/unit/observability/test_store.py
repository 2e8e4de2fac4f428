"""The span store: what is written is found, and it does not grow without bound."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from observability.analysis.decode import decode
from observability.analysis.source import StoreError
from observability.analysis.store import SpanReader, SpanStore
from observability.emit import names
from tests.unit.observability.planted import message, request_trace, write


def _store(path: Path, *, max_spans: int = 100_000, max_bytes: int = 1 << 30) -> SpanStore:
    return SpanStore(path, max_spans=max_spans, max_bytes=max_bytes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "traces.sqlite"


def test_a_trace_is_found_by_request_id_trace_id_and_as_the_last(path: Path) -> None:
    store = _store(path)
    first = request_trace("r-1", number=1)
    second = request_trace("r-2", number=2, start_ns=first[0].start_ns + 10**9)
    write(store, [*second, *first])
    reader = SpanReader(path)
    for what, spans in (
        ("r-1", first),
        (first[0].trace_id, first),
        ("r-2", second),
        ("last", second),
        # The id in the form in which clients read it in their answers.
        ("chatcmpl-r-1", first),
        ("cmpl-r-2", second),
    ):
        assert {span.span_id for span in reader.find(what)} == {span.span_id for span in spans}
    found = reader.find("r-1")
    assert sorted(found, key=lambda span: span.span_id) == first


def test_a_trace_that_only_the_edge_saw_is_found_by_its_own_attribute(path: Path) -> None:
    store = _store(path)
    edge = request_trace("r-7")[0]
    assert names.REQUEST_ID not in edge.attributes
    write(store, [edge])
    assert SpanReader(path).find("r-7") == [edge]
    assert SpanReader(path).find("last") == [edge]


def test_a_clients_own_id_finds_its_request_and_never_hides_that_of_another(path: Path) -> None:
    store = _store(path)
    asked = request_trace("r-1", number=1, attributes={str(names.CLIENT_REQUEST_ID): "order-17"})
    later = asked[0].start_ns + 10**9
    copied = request_trace("r-2", number=2, attributes={str(names.CLIENT_REQUEST_ID): "r-1"}, start_ns=later)
    write(store, [*asked, *copied])
    reader = SpanReader(path)
    assert {span.trace_id for span in reader.find("order-17")} == {asked[0].trace_id}
    assert {span.trace_id for span in reader.find("r-1")} == {asked[0].trace_id}
    assert {span.trace_id for span in reader.find("chatcmpl-r-1")} == {asked[0].trace_id}
    assert reader.traces_of_request("r-1") == [asked[0].trace_id, copied[0].trace_id]


def test_a_span_that_is_sent_twice_is_kept_once(path: Path) -> None:
    store = _store(path)
    spans = request_trace()
    write(store, spans)
    write(store, spans)
    assert len(SpanReader(path).find("last")) == len(spans)


def test_errors_say_what_to_do(tmp_path: Path, path: Path) -> None:
    with pytest.raises(StoreError, match="no span store at"):
        SpanReader(path)
    (tmp_path / "text").write_text("not a database, and long enough to be looked at as one" * 100)
    with pytest.raises(StoreError, match="not a span store"):
        SpanReader(tmp_path / "text")
    with pytest.raises(StoreError, match="cannot open"):
        _store(tmp_path / "text" / "below")
    _store(path).close()
    with pytest.raises(StoreError, match="empty"):
        SpanReader(path).find("last")
    with pytest.raises(StoreError, match="no request or trace 'nobody'"):
        SpanReader(path).find("nobody")


@settings(max_examples=25, deadline=None)
@given(batches=st.lists(st.integers(1, 60), min_size=1, max_size=20))
def test_the_newest_spans_stay_within_the_bound(
    tmp_path_factory: pytest.TempPathFactory, batches: list[int]
) -> None:
    path = tmp_path_factory.mktemp("store") / "traces.sqlite"
    store = _store(path, max_spans=100)
    template = request_trace()[0]
    written: list[str] = []
    for count in batches:
        ids = [f"{len(written) + index:016x}" for index in range(count)]
        write(store, [replace(template, span_id=span_id) for span_id in ids])
        written += ids
        kept = [span.span_id for span in SpanReader(path).trace(template.trace_id)]
        assert len(kept) <= 100
        assert kept
        assert set(kept) == set(written[-len(kept) :])
        # Whole messages go.
        assert len(kept) >= min(len(written), 90 - 60)


def test_the_file_stays_within_the_bytes(path: Path) -> None:
    limit = 1_000_000
    store = _store(path, max_bytes=limit)
    template = request_trace()[0]
    for batch in range(40):
        spans = [
            replace(template, span_id=f"{batch * 100 + index:016x}", attributes={"text": "x" * 1000})
            for index in range(100)
        ]
        write(store, spans)
    assert store._used_bytes() < limit * 2.7
    kept = SpanReader(path).trace(template.trace_id)
    assert f"{3999:016x}" in {span.span_id for span in kept}


def test_a_moment_is_looked_up_by_an_index(path: Path) -> None:
    write(_store(path), request_trace())
    reader = SpanReader(path)
    plans: list[str] = []
    reader._db.set_trace_callback(plans.append)
    reader.spans_named(names.GATEWAY_REQUEST, since_ns=0)
    reader.spans_between((names.ENGINE_PREFILL,), 1, 2)
    reader._db.set_trace_callback(None)
    assert len(plans) == 2
    for query in plans:
        (row, *_) = reader._db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        assert "USING INDEX messages_by_time" in row[3], row


def test_ids_that_hide_in_other_bytes_are_not_taken_for_a_request(path: Path) -> None:
    """The search is over bytes: what it finds is looked at before it is believed."""
    store = _store(path)
    inside = request_trace("r-11", number=1)
    write(store, [replace(span, attributes={**span.attributes, "note": "r-1"}) for span in inside])
    with pytest.raises(StoreError):
        SpanReader(path).find("r-1")
    with pytest.raises(StoreError):
        SpanReader(path).find("")


def test_a_store_of_the_earlier_form_is_replaced(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as earlier:
        earlier.execute("CREATE TABLE spans (sequence INTEGER PRIMARY KEY)")
    earlier.close()
    with pytest.raises(StoreError, match="not a span store"):
        SpanReader(path)
    write(_store(path), request_trace("r-1"))
    assert SpanReader(path).find("r-1")


def test_spans_named_gives_the_newest_first_since_a_moment(path: Path) -> None:
    store = _store(path)
    start_ns = 10**18
    for number in range(5):
        write(store, request_trace(f"r-{number}", number=number + 1, start_ns=start_ns + number * 10**9))
    found = SpanReader(path).spans_named(names.ENVOY_INGRESS, since_ns=start_ns + 2 * 10**9, limit=2)
    assert [span.request_id for span in found] == ["r-4", "r-3"]


@pytest.mark.parametrize("told", ["", "no JSON", "[1]", '{"millrace.face":', 7])
def test_details_that_are_none_of_ours_leave_the_span_as_it_is(told: str | int) -> None:
    edge = request_trace()[0]
    sent = replace(edge, attributes={**edge.attributes, str(names.DETAILS): told})
    assert list(decode(message([sent]))) == [edge]
