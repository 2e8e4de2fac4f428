"""What the client left open: the checkpoint's recommendation, a seed, and as many tokens as fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from contract.chat import TextPrompt
from contract.errors import MillraceError
from contract.outputs import ChoiceStatistics, FirstToken
from contract.sampling import SamplingOptions
from gateway.engines.types import Chosen, EngineOutput
from gateway.pipeline.delta import Meter
from gateway.pipeline.validate import (
    check_vocabulary,
    checkpoint_defaults,
    complete,
    completion_limit,
    token_limit,
)
from gateway.types.request import GenerationRequest


def asked(max_tokens: int | None) -> GenerationRequest:
    return GenerationRequest(
        model="m",
        prompt=TextPrompt("x"),
        sampling=SamplingOptions(max_tokens=max_tokens),
        field_names={"max_tokens": "max_completion_tokens", "prompt": "messages"},
    )


def test_what_fits_is_generated_when_nothing_is_said() -> None:
    assert completion_limit(asked(None), 10, 100) == 90
    assert completion_limit(asked(90), 10, 100) == 90
    assert token_limit(4096, 100) == 100
    assert token_limit(4096, None) == 4096


@pytest.mark.parametrize(
    ("max_tokens", "prompt_tokens", "field"), [(91, 10, "max_completion_tokens"), (None, 100, "messages")]
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    max_tokens: int | None, prompt_tokens: int, field: str
) -> None:
    with pytest.raises(MillraceError) as refusal:
        completion_limit(asked(max_tokens), prompt_tokens, 100)
    assert refusal.value.field == field
    assert refusal.value.metadata["max_context_tokens"] == "100"


def test_what_is_allowed_has_a_token() -> None:
    tokens = (b"a", b"", b"b", b"")

    def check(*ids: int) -> None:
        request = replace(asked(None), sampling=SamplingOptions(allowed_token_ids=ids))
        check_vocabulary(request, tokens)

    check(1, 2)
    with pytest.raises(MillraceError, match="no id in it has a token") as refusal:
        check(3, 1)
    assert refusal.value.field == "allowed_token_ids"
    with pytest.raises(MillraceError, match="outside the vocabulary of 4 tokens"):
        check(4)


def test_the_checkpoint_recommends_and_the_client_decides() -> None:
    recommended = checkpoint_defaults({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "eos_token_id": 3})
    assert recommended == {"temperature": 0.6, "top_k": 20, "top_p": 0.9}
    sampling = complete(
        SamplingOptions(temperature=0.0, n=2), defaults=recommended, max_tokens=5, eos_token_ids=(3,)
    )
    assert (sampling.temperature, sampling.top_k, sampling.n, sampling.best_of) == (0.0, 20, 2, 2)
    assert sampling.stop_token_ids == (3,)
    leftovers = {"do_sample": False, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert checkpoint_defaults(leftovers) == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert checkpoint_defaults({"temperature": True, "top_k": "many"}) == {}


def test_requests_without_a_seed_differ_and_can_be_continued() -> None:
    seeds = {complete(SamplingOptions(), defaults={}, max_tokens=1, eos_token_ids=()).seed for _ in range(8)}
    assert len(seeds) == 8
    given = complete(SamplingOptions(seed=5), defaults={}, max_tokens=1, eos_token_ids=())
    assert given.seed == 5


def test_end_tokens_are_ignored_on_request_but_own_stop_tokens_are_not() -> None:
    options = SamplingOptions(ignore_eos=True, stop_token_ids=(7,))
    sampling = complete(options, defaults={}, max_tokens=1, eos_token_ids=(3,))
    assert sampling.stop_token_ids == (7,)


def test_the_parts_of_the_time_to_the_first_token_sum_to_the_total() -> None:
    meter = Meter(100.0, [].append)
    assert meter.ttft() is None
    meter.submitted_s = 100.010
    output = EngineOutput(0, [1, 2], first_token=FirstToken(0.002, 0.020, 0.001, 4, 1))
    meter.count(output, 100.040)
    meter.first_written_s = 100.041
    ttft = meter.ttft()
    assert ttft is not None
    assert ttft.total_s == pytest.approx(0.041)
    assert ttft.network_s == pytest.approx(0.007)
    assert ttft.total_s == pytest.approx(
        ttft.queue_s
        + ttft.preprocess_s
        + ttft.prefill_s
        + ttft.first_decode_s
        + ttft.deliberation_s
        + ttft.serialize_s
        + ttft.network_s
    )


def test_tokens_that_are_heard_of_at_once_were_not_computed_at_once() -> None:
    meter = Meter(100.0, [].append, 100.0)
    assert meter.tokens_per_s is None
    meter.count(EngineOutput(0, [1], first_token=FirstToken(0.002, 0.017, 0.001, 4, 1)), 100.050)
    assert meter.tokens_per_s is None, "of one token"
    meter.count(EngineOutput(0, [2, 3, 4]), 100.0501)
    assert meter.tokens_per_s == pytest.approx(3 / 0.0301)


def test_an_answer_that_was_chosen_has_the_times_of_its_sample() -> None:
    gaps_s: list[float] = []
    of_sample = Meter(100.0, gaps_s.append, 100.0)
    first = FirstToken(0.002, 0.017, 0.001, 4, 1)
    of_sample.count(EngineOutput(0, [1, 2], first_token=first, chosen=Chosen(100.023, 0.004)), 100.5)
    of_sample.count(EngineOutput(0, [3, 4]), 100.5001)
    of_sample.first_written_s = 100.501
    assert of_sample.tokens_per_s == pytest.approx(250.0)
    assert of_sample.tpot_s(1) == pytest.approx(0.004)
    assert (gaps_s, of_sample.longest_gap_s) == ([], 0.0)
    ttft = of_sample.ttft()
    assert ttft is not None
    assert ttft.deliberation_s == pytest.approx(0.477)
    assert ttft.network_s == pytest.approx(0.003)
    assert ttft.total_s == pytest.approx(0.501)


def test_statistics_of_choices_and_engines_add_up() -> None:
    meter = Meter(0.0, [].append)
    for causes in ({"long_prefill": 0.1}, {"long_prefill": 0.2, "kv_pressure": 0.3}):
        statistics = ChoiceStatistics(num_steps=2, drafted_tokens=4, delayed_by_s=causes)
        meter.count(EngineOutput(0, [1], statistics=statistics), 1.0)
    assert meter.completion_tokens == 2
    assert meter.statistics.num_steps == 4
    assert meter.statistics.delayed_by_s == pytest.approx({"long_prefill": 0.3, "kv_pressure": 0.3})


def test_gaps_are_told_between_outputs_that_have_tokens() -> None:
    gaps_s: list[float] = []
    meter = Meter(0.0, gaps_s.append)
    for token_ids, now_s in (([1], 1.0), ([2], 1.5), ([], 1.75), ([3, 4], 2.0)):
        meter.count(EngineOutput(0, token_ids), now_s)
    assert gaps_s == [0.5, 0.25]
    assert meter.longest_gap_s == 0.5
