"""What the core reports becomes the metrics that are declared."""

from __future__ import annotations

import os

from engine.core.messages import Ready, StepDone, StepTotals
from engine.service.metrics import EngineMetrics
from engine.types import (
    BlocksEvicted,
    BlocksStored,
    ChoiceHistory,
    FinishReason,
    FirstTokenTimings,
    MemoryUse,
    ModelFacts,
    RequestFailure,
    SchedulerCounters,
    SchedulerLoad,
    TokenEvent,
)
from engine.types.experts import ExpertSpread
from engine.types.step import ModelWork
from observability.emit import experts, names, retention
from observability.emit.metrics import Metrics
from tests.unit.engine.driver import memory_plan

LOAD = SchedulerLoad(
    num_running=3,
    num_waiting=2,
    pending_prefill_tokens=40,
    num_free_blocks=25,
    num_cached_blocks=15,
    num_total_blocks=100,
    prefill_tokens_per_s=0.0,
    decode_tokens_per_s=0.0,
    oldest_wait_s=1.5,
    counters=SchedulerCounters(
        prefix_queried_tokens=56,
        prefix_hit_tokens=16,
        restored_tokens=4,
        computed_prompt_tokens=36,
        recomputed_tokens=5,
        offloaded_blocks=7,
        restored_blocks=2,
        num_renewals=3,
        renewal_s=0.75,
        preemptions={"kv_pressure": 3, "preemption": 1},
    ),
)


def _value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def _taken(step: StepDone) -> Metrics:
    metrics = Metrics()
    EngineMetrics(metrics).steps_done([(step, {7: "gold"})])
    return metrics


def test_the_load_becomes_gauges_for_the_endpoint_picker() -> None:
    metrics = _taken(StepDone(1, [], (), LOAD))
    assert _value(metrics, names.REQUESTS_WAITING.name) == 2
    assert _value(metrics, names.REQUESTS_RUNNING.name) == 3
    assert _value(metrics, names.KV_USAGE.name) == 0.75
    assert _value(metrics, names.OLDEST_WAIT.name) == 1.5
    assert _value(metrics, names.KV_BLOCKS.name, state="free") == 10
    assert _value(metrics, names.KV_BLOCKS.name, state="cached") == 15


def test_counters_of_the_core_are_not_counted_twice() -> None:
    metrics = Metrics()
    engine = EngineMetrics(metrics)
    for _ in range(3):
        engine.steps_done([(StepDone(1, [], (), LOAD), {})])
    assert _value(metrics, names.PREEMPTIONS.name) == 4
    assert _value(metrics, names.PREFIX_QUERIES.name) == 56
    assert _value(metrics, names.PREFIX_HITS.name) == 16
    assert _value(metrics, names.RECOMPUTED.name) == 5
    assert _value(metrics, names.PROMPT_TOKENS_DONE.name, source="restored") == 4
    assert _value(metrics, names.OFFLOADED.name, direction="out") == 7
    assert _value(metrics, retention.RENEWALS.name) == 3
    assert _value(metrics, retention.RENEWAL_SECONDS.name) == 0.75


def test_events_are_counted_under_the_tier_of_their_request() -> None:
    first = FirstTokenTimings(
        arrival_s=10.0,
        first_scheduled_s=10.5,
        prefill_end_s=11.5,
        first_token_s=11.6,
        cached_prompt_tokens=16,
        prefill_chunks=((10.5, 11.0, 32), (11.0, 11.5, 8)),
    )
    statistics = ChoiceHistory(
        recomputed_tokens=5,
        drafted_tokens=8,
        accepted_tokens=6,
        drafts={"grammar": (3, 3), "eagle3": (5, 3)},
        decode_s=2.0,
        delayed_by_s={"kv_pressure": 0.25},
    )
    events = [
        TokenEvent(request_id=7, token_ids=(1,), first_token=first),
        TokenEvent(
            request_id=7, token_ids=(2, 3), finish_reason=FinishReason.CANCELLED, statistics=statistics
        ),
    ]
    metrics = _taken(StepDone(1, events, (), LOAD))
    assert _value(metrics, names.GENERATED_TOKENS.name, tier="gold") == 3
    assert _value(metrics, f"{names.QUEUE_SECONDS.name}_sum", tier="gold") == 0.5
    assert _value(metrics, f"{names.PREFILL_SECONDS.name}_sum", tier="gold") == 1.0
    for method, drafted, accepted in (("grammar", 3, 3), ("eagle3", 5, 3)):
        assert _value(metrics, names.DRAFTED.name, method=method) == drafted
        assert _value(metrics, names.ACCEPTED.name, method=method) == accepted
    assert _value(metrics, names.DELAYED_SECONDS.name, cause="kv_pressure", tier="gold") == 0.25
    assert _value(metrics, names.ENGINE_CANCELLED.name, reason="cancelled") == 1


def test_steps_and_cache_changes_are_observed() -> None:
    totals = StepTotals(
        kind="mixed", num_tokens=48, num_sequences=5, seconds=0.02, saved_s=0.03, spent_s=0.01
    )
    changes = (BlocksStored((1, 2, 3)), BlocksEvicted((4, 5)))
    metrics = _taken(StepDone(1, [], changes, LOAD, (totals,)))
    assert _value(metrics, f"{names.STEP_SECONDS.name}_sum", kind="mixed") == 0.02
    assert _value(metrics, f"{names.STEP_TOKENS.name}_sum") == 48
    assert _value(metrics, f"{names.STEP_SEQUENCES.name}_sum") == 5
    assert _value(metrics, names.SPECULATION_SECONDS.name, kind="saved", method="off") == 0.03
    assert _value(metrics, names.SPECULATION_SECONDS.name, kind="spent", method="off") == 0.01
    assert _value(metrics, names.EVICTIONS.name) == 2


def test_what_should_not_happen_is_counted_from_zero() -> None:
    families = (names.FAILED_STEPS, names.STEP_HALVINGS, names.ISOLATED, names.STEP_FAILURES)
    quiet = _taken(StepDone(1, [], (), LOAD))
    assert [_value(quiet, family.name) for family in families] == [0, 0, 0, 0]
    events = [
        TokenEvent(request_id=7, failure=RequestFailure(reason=reason, message="it failed"))
        for reason in ("POISONED_REQUEST", "STEP_FAILED", "STEP_FAILED", "DEADLINE_EXCEEDED")
    ]
    totals = StepTotals(kind="mixed", num_tokens=48, num_sequences=5, seconds=0.02, num_halvings=3)
    metrics = _taken(StepDone(1, events, (), LOAD, (totals,), num_failed_steps=2))
    assert [_value(metrics, family.name) for family in families] == [2, 3, 1, 2]


def test_counters_are_there_before_their_first_event() -> None:
    metrics = Metrics()
    EngineMetrics(metrics)
    assert _value(metrics, names.PREEMPTIONS.name) == 0
    assert _value(metrics, names.EVICTIONS.name) == 0
    assert _value(metrics, names.PROMPT_TOKENS_DONE.name, source="computed") == 0


def test_what_the_memory_really_takes_is_exposed_beside_the_plan() -> None:
    use = MemoryUse(weights_bytes=90, kv_cache_bytes=40, workspace_bytes=70)
    metrics = _taken(StepDone(1, [], (), LOAD, memory=use))
    parts = [
        _value(metrics, names.MEMORY_USED.name, part=part) for part in ("weights", "kv_cache", "workspace")
    ]
    assert parts == [90, 40, 70]


def test_how_experts_are_spread_is_exposed_where_ranks_have_some_each() -> None:
    metrics = Metrics()
    engine = EngineMetrics(metrics)
    engine.steps_done([(StepDone(1, [], (), LOAD), {})])
    assert _value(metrics, experts.IMBALANCE.name) is None
    for uneven, moved in ((1.0, 0), (1.75, 0), (1.25, 4), (1.125, 6)):
        spread = ExpertSpread(imbalance=uneven, num_moves=moved)
        engine.steps_done([(StepDone(1, [], (), LOAD, experts=spread), {})])
        assert _value(metrics, experts.IMBALANCE.name) == uneven
        assert _value(metrics, experts.MOVES.name) == moved


def test_the_memory_plan_is_exposed_once_ready() -> None:
    metrics = Metrics()
    memory = memory_plan(num_blocks=25, block_size=16, max_model_len=400)
    facts = ModelFacts(
        max_model_len=400,
        vocab_size=10,
        eos_token_ids=(),
        dtype="float32",
        attention_backend="torch",
        device="cpu",
        num_layers=1,
        work=ModelWork(peak_flop=2e12, peak_read_bytes=0.0),
        drafter="eagle3",
    )
    ready = Ready(memory, facts, {"load weights": 2.5, "capture graphs": 1.5})
    engine = EngineMetrics(metrics)
    engine.ready(ready, "nano", os.getpid())
    assert _value(metrics, names.PEAK.name, of="flop") == 2e12
    # What is not known is not told.
    assert _value(metrics, names.PEAK.name, of="read_bytes") is None
    assert _value(metrics, names.STARTUP_SECONDS.name, stage="load weights") == 2.5
    assert _value(metrics, names.STARTUP_SECONDS.name, stage="capture graphs") == 1.5
    assert (_value(metrics, names.MEMORY_PLAN.name, part="resident") or 0) > 1_000_000
    assert _value(metrics, names.MEMORY_PLAN.name, part="kv_cache") == 400
    assert _value(metrics, names.CACHE_INFO.name, block_size="16", num_blocks="25") == 1
    # From zero, for whom it has.
    assert [_value(metrics, names.DRAFTED.name, method=each) for each in ("grammar", "eagle3", "ngram")] == [
        0,
        0,
        None,
    ]
    totals = StepTotals(kind="decode", num_tokens=5, num_sequences=1, seconds=0.02, saved_s=0.03)
    engine.steps_done([(StepDone(1, [], (), LOAD, (totals,)), {})])
    assert _value(metrics, names.SPECULATION_SECONDS.name, kind="saved", method="eagle3") == 0.03
