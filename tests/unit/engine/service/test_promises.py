"""What a tier promised reaches the engine's request from the signed context."""

from __future__ import annotations

import pytest
from millrace.common.v1 import context_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2

from engine.config import AdaptersConfig
from engine.service.adapters import ServedAdapters
from engine.service.convert import ModelLimits, to_request
from engine.types import ModelFacts, Request

NOW_S = 50.0
FACTS = ModelFacts(
    max_model_len=1024,
    vocab_size=100,
    eos_token_ids=(),
    dtype="none",
    attention_backend="simulated",
    device="none",
    num_layers=0,
)


def request(**promises: int) -> Request:
    adapters = ServedAdapters(AdaptersConfig(), lambda command: None, lambda: None)
    options = sampling_pb2.SamplingOptions(seed=1, max_tokens=4)
    return to_request(
        engine_pb2.Submit(prompt_token_ids=[1, 2, 3], sampling=options),
        context_pb2.RequestContext(request_id="r", **promises),  # type: ignore[arg-type]
        ModelLimits(facts=FACTS, max_tokens_total=1024, simulated=True, adapters=adapters),
        request_id=1,
        now_s=NOW_S,
        now_unix_ms=0,
    )


def test_targets_and_limits_are_those_of_the_context() -> None:
    found = request(ttft_target_ms=500, tpot_target_ms=60, queue_limit_ms=900)
    assert found.ttft_deadline_s == NOW_S + 0.5
    assert found.tpot_target_s == pytest.approx(0.06)
    assert found.queue_deadline_s == NOW_S + 0.9


def test_a_tier_without_targets_promises_none() -> None:
    found = request()
    assert (found.ttft_deadline_s, found.tpot_target_s, found.queue_deadline_s) == (None, None, None)
