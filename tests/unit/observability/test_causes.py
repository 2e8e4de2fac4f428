"""The verdict on a request names the cause that was planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from observability.analysis import why
from observability.analysis.causes import Explanation, explain
from observability.analysis.decode import StoredSpan
from observability.analysis.store import SpanReader, SpanStore
from observability.emit import genai, names
from observability.emit.names import Cause, TtftPart
from tests.unit.observability.planted import MS, PARTS, START_NS, request_trace, write


@pytest.mark.parametrize("cause", list(Cause))
def test_a_measured_delay_is_blamed_by_name_and_number(cause: Cause) -> None:
    smaller = Cause.KV_PRESSURE if cause is Cause.OFFLOAD else Cause.OFFLOAD
    spans = request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 300.0}, delays_ms={cause: 300.0, smaller: 6.0})
    explanation = explain([*spans, _told(spans, spans[-1].start_ns)])
    assert explanation.cause is cause
    assert {finding.cause for finding in explanation.findings} == {cause, smaller, None}
    assert _sum_ms(explanation) == pytest.approx(explanation.total_ms)
    assert cause.meaning in explanation.verdict
    assert explanation.verdict.startswith("300 of 480 ms")


def test_a_request_that_nothing_held_back_is_told_what_it_did_itself() -> None:
    explanation = explain(request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 0.0}, decode_ms=500.0))
    assert explanation.cause is None
    assert explanation.verdict.startswith("nothing held it back: generating")


def test_what_is_generated_at_the_same_time_is_counted_once() -> None:
    spans = request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 0.0}, decode_ms=500.0)
    decode = spans[-1]
    others = [replace(decode, start_ns=decode.start_ns + at * MS) for at in (100, 200)]
    longer = replace(decode, start_ns=decode.end_ns - 10 * MS, end_ns=decode.end_ns + 50 * MS)
    generating = explain([*spans, *others, longer]).findings[0]
    assert (generating.text, generating.milliseconds) == ("generating", decode.duration_ms + 50.0)


def test_samples_of_one_answer_are_generated_before_its_first_token() -> None:
    used = {str(genai.OUTPUT_TOKENS): 64}
    parts = {**PARTS, TtftPart.QUEUE: 0.0, TtftPart.DELIBERATION: 400.0}
    spans = request_trace(parts_ms=parts, decode_ms=0.0, attributes=used)
    decode = spans.pop()
    deliberates_ns = 400 * MS
    spans.append(replace(decode, start_ns=decode.end_ns - deliberates_ns))
    explanation = explain([*spans, _told(spans, decode.end_ns)])
    told = [(each.text, each.milliseconds) for each in explanation.findings]
    assert told[0] == ("generating samples until one was chosen, 64 tokens", 400.0)
    assert not [text for text, _ in told if text.startswith("generating 64")]
    assert _sum_ms(explanation) == pytest.approx(explanation.total_ms)


def test_waits_of_samples_at_the_same_time_are_no_longer_than_that_time() -> None:
    parts = {**PARTS, TtftPart.QUEUE: 0.0, TtftPart.PREFILL: 0.0, TtftPart.DELIBERATION: 400.0}
    spans = request_trace(parts_ms=parts, delays_ms={Cause.BATCH_FULL: 7 * 30.0}, decode_ms=0.0)
    first = spans[-1]
    sample = replace(first, span_id="d" * 16, name=str(names.GATEWAY_SAMPLE))
    start_ns = first.end_ns - 300 * MS
    wait = replace(first, name=str(names.ENGINE_QUEUE), start_ns=start_ns, end_ns=start_ns + 30 * MS)
    waits = [replace(wait, span_id=f"{number:016x}") for number in range(7)]
    explanation = explain([*spans, sample, *waits, _told(spans, first.end_ns)])
    (delay,) = (each for each in explanation.findings if each.cause)
    assert delay.cause is Cause.BATCH_FULL
    assert delay.milliseconds == pytest.approx(30.0)
    assert _sum_ms(explanation) == pytest.approx(explanation.total_ms)


def test_a_wait_that_no_cause_was_named_for_is_no_full_batch() -> None:
    explanation = explain(request_trace(decode_ms=500.0))
    assert explanation.cause is None
    assert explanation.verdict.startswith("nothing held it back: generating")
    (wait,) = (each for each in explanation.findings if each.is_wait)
    assert (wait.text, wait.milliseconds) == (TtftPart.QUEUE.meaning, 20.0)
    longer = explain(request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 700.0}))
    assert longer.verdict == f"no cause was named: {TtftPart.QUEUE.meaning}, 700 ms"


def test_what_was_generated_before_the_first_token_was_told_is_counted_once() -> None:
    parts = {**PARTS, TtftPart.QUEUE: 0.0, TtftPart.NETWORK: 90.0}
    spans = request_trace(parts_ms=parts, decode_ms=100.0)
    decode = spans.pop()
    early = replace(decode, start_ns=decode.start_ns - 80 * MS)
    explanation = explain([*spans, early, _told(spans, decode.start_ns)])
    assert next(each for each in explanation.findings if each.text == "generating").milliseconds == 100.0
    assert _sum_ms(explanation) == pytest.approx(explanation.total_ms)


def _told(spans: list[StoredSpan], at_ns: int) -> StoredSpan:
    """From the gateway's first output on."""
    request = next(span for span in spans if span.name == names.GATEWAY_REQUEST)
    name, parent = str(names.GATEWAY_STREAM), request.span_id
    return replace(request, span_id="5" * 16, parent_id=parent, name=name, start_ns=at_ns, attributes={})


def _sum_ms(explanation: Explanation) -> float:
    return sum(each.milliseconds for each in explanation.findings)


def test_a_trace_without_the_gateways_part_is_not_judged() -> None:
    """What Envoy exported first says how long it took, and nothing about why."""
    explanation = explain(request_trace()[:1])
    assert explanation.cause is None
    assert "not here yet" in explanation.verdict


def test_a_client_that_left_is_no_failure_and_what_it_waited_for_is_named() -> None:
    left = {str(names.OUTCOME): "CANCELLED"}
    waited = explain(request_trace(delays_ms={Cause.KV_PRESSURE: 300.0}, attributes=left))
    assert waited.cause is Cause.KV_PRESSURE
    assert waited.verdict.startswith("its client left after")
    assert Cause.KV_PRESSURE.meaning in waited.verdict
    served = explain(request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 0.0}, attributes=left))
    assert served.cause is None
    assert "until then nothing held it back" in served.verdict


def test_a_small_delay_is_listed_but_not_blamed() -> None:
    explanation = explain(
        request_trace(
            parts_ms={**PARTS, TtftPart.QUEUE: 0.0}, delays_ms={Cause.KV_PRESSURE: 6.0}, decode_ms=900
        )
    )
    assert explanation.cause is None
    assert explanation.findings[0].cause is Cause.KV_PRESSURE


def _with_compile(cache: str) -> list[StoredSpan]:
    spans = request_trace(parts_ms={**PARTS, TtftPart.PREPROCESS: 250.0, TtftPart.QUEUE: 0.0})
    prepare = next(span for span in spans if span.name == names.TOKENIZER_PREPARE)
    compiled = replace(
        prepare,
        span_id="c" * 16,
        parent_id=prepare.span_id,
        name=str(names.TOKENIZER_COMPILE),
        end_ns=prepare.start_ns + 240 * MS,
        attributes={str(names.GRAMMAR_CACHE): cache},
    )
    return [*spans, compiled]


def test_a_grammar_that_was_compiled_is_blamed_and_one_from_the_cache_is_not() -> None:
    assert explain(_with_compile("miss")).cause is Cause.GRAMMAR_COMPILE
    assert explain(_with_compile("hit")).cause is None


def test_what_the_engine_needs_to_follow_a_grammar_comes_on_top_and_is_no_full_batch() -> None:
    spans = request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 300.0}, delays_ms={Cause.GRAMMAR_COMPILE: 300.0})
    (alone,) = (each for each in explain(spans).findings if each.cause)
    assert alone.milliseconds == 300.0
    compiled = replace(spans[-1], span_id="e" * 16, name=str(names.TOKENIZER_COMPILE), attributes={})
    (both,) = (each for each in explain([*spans, compiled]).findings if each.cause)
    assert both.cause is Cause.GRAMMAR_COMPILE
    assert both.milliseconds == pytest.approx(300.0 + compiled.duration_ms)


def test_preemption_is_told_with_its_numbers() -> None:
    spans = request_trace(parts_ms={**PARTS, TtftPart.QUEUE: 0.0}, delays_ms={Cause.PREEMPTION: 90.0})
    decode = spans[-1]
    more = {str(names.NUM_PREEMPTIONS): 2, str(names.RECOMPUTED_TOKENS): 640}
    spans[-1] = replace(decode, attributes={**decode.attributes, **more})
    explanation = explain(spans)
    assert explanation.cause is Cause.PREEMPTION
    assert "preempted 2 times, 640 tokens computed again" in explanation.verdict


def test_waiting_for_a_place_that_was_taken_away_is_preemption() -> None:
    spans = request_trace(delays_ms={Cause.BATCH_FULL: 20.0 + 500.0}, decode_ms=900.0)
    assert explain(spans).cause is Cause.BATCH_FULL
    spans[-1] = replace(spans[-1], attributes={**spans[-1].attributes, str(names.NUM_PREEMPTIONS): 1})
    findings = {finding.cause: finding.milliseconds for finding in explain(spans).findings}
    assert findings[Cause.PREEMPTION] == 500.0
    assert findings[Cause.BATCH_FULL] == 20.0
    assert explain(spans).cause is Cause.PREEMPTION


def test_a_refusal_by_limits_is_the_cause() -> None:
    edge = request_trace()[0]
    attributes = {str(names.OUTCOME): "TOKEN_RATE_EXCEEDED", str(names.RETRY_AFTER_S): 12.5}
    request = replace(
        edge, span_id="f" * 16, name=str(names.GATEWAY_REQUEST), service="gateway", attributes=attributes
    )
    explanation = explain([edge, request])
    assert explanation.cause is Cause.RATE_LIMIT
    assert "TOKEN_RATE_EXCEEDED" in explanation.verdict
    assert "retry after 12.5 s" in explanation.verdict
    other = replace(request, attributes={str(names.OUTCOME): "NEVER_FITS"})
    assert explain([edge, other]).cause is None


def _chunk(spans: list[StoredSpan], engine: str, tokens: int) -> list[StoredSpan]:
    changed = []
    for span in spans:
        more: dict[str, object] = {}
        if span.name == names.ENGINE_REQUEST:
            more = {str(names.ENGINE_ID): engine, str(names.TENANT): "loud"}
        if span.name == names.ENGINE_PREFILL:
            more = {str(names.CHUNK_TOKENS): tokens}
        changed.append(replace(span, attributes={**span.attributes, **more}))
    return changed


def test_the_neighbour_that_filled_the_steps_is_named(tmp_path: Path) -> None:
    mine = request_trace("mine", number=1, delays_ms={Cause.LONG_PREFILL: 150.0})
    long_parts = {**PARTS, TtftPart.QUEUE: 0.0, TtftPart.PREFILL: 180.0}
    loud = request_trace("loud", number=2, parts_ms=long_parts)
    # It has several texts, each with a span of its own.
    (engine,) = (span for span in loud if span.name == names.ENGINE_REQUEST)
    loud += [replace(engine, span_id=f"{number:016x}") for number in (71, 72)]
    elsewhere = request_trace("elsewhere", number=3, parts_ms=long_parts)
    later = request_trace("later", number=4, start_ns=START_NS + 10**10)
    path = tmp_path / "traces.sqlite"
    store = SpanStore(path, max_spans=1000, max_bytes=1 << 30)
    write(store, _chunk(mine, "e0", 10) + _chunk(loud, "e0", 8192))
    write(store, _chunk(elsewhere, "e1", 8192) + _chunk(later, "e0", 8192))
    explanation, spans = why.explain_stored(SpanReader(path), "mine")
    assert [each.request_id for each in explanation.neighbours] == ["loud"]
    assert explanation.cause is Cause.LONG_PREFILL
    assert "request loud of tenant loud: 8192 prompt tokens" in explanation.verdict
    why.render(explanation, spans)


def test_the_command_prints_and_fails_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "traces.sqlite"
    assert why.main(["--store", str(path), "r"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    write(SpanStore(path, max_spans=1000, max_bytes=1 << 30), request_trace("r"))
    assert why.main(["--store", str(path), "r"]) == 0
    shown = capsys.readouterr().out
    assert "request r" in shown
    assert "tenant acme" in shown
    assert why.main(["--store", str(path), "nobody"]) == 1
    assert "no request or trace 'nobody'" in capsys.readouterr().err
