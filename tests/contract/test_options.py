"""Every declared sampling option at its limits: both faces and the engine agree, and refuse before work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from millrace.common.v1 import sampling_pb2
from millrace.inference.v1 import inference_pb2

from contract.errors import MillraceError, Reason
from contract.proto.engine import sampling_fields
from contract.sampling import OPTIONS, RANGES
from engine.config import AdaptersConfig
from engine.service.adapters import ServedAdapters
from engine.service.convert import ModelLimits, to_sampling
from engine.types import ModelFacts
from gateway.faces.grpc import convert as grpc_face
from gateway.faces.openai import chat, completions
from gateway.http.body import decode
from gateway.pipeline.validate import complete, validate
from gateway.types.request import GenerationRequest

# What else must be said for a value to be allowed.
BESIDE: dict[str, dict[str, Any]] = {
    "best_of": {"n": 1},
    "n": {"best_of": 128},
    "beam_width": {"n": 1},
    "min_tokens": {"max_tokens": RANGES["max_tokens"].maximum},
    "logit_bias": {},
}
FACTS = ModelFacts(
    max_model_len=64,
    vocab_size=32,
    eos_token_ids=(3,),
    dtype="float32",
    attention_backend="none",
    device="cpu",
    num_layers=1,
)
LIMITS = ModelLimits(
    facts=FACTS,
    max_tokens_total=64,
    simulated=True,
    adapters=ServedAdapters(AdaptersConfig(), lambda command: None, lambda: None),
)


def bounded() -> Iterator[tuple[str, float, float, float]]:
    """(option, end, one beyond it, the sign of beyond)."""
    for name, option in OPTIONS.items():
        if option.limits.maximum < float("inf"):
            # vLLM's clients say -1 for all tokens, which the HTTP face takes.
            step = 2 if name == "top_k" else 1 if option.kind is int else 0.5
            for end, sign in ((option.limits.minimum, -1), (option.limits.maximum, 1)):
                yield name, end, end + sign * step, sign


ENDS = list(bounded())
IDS = [f"{name}-{'highest' if sign > 0 else 'lowest'}" for name, _, _, sign in ENDS]


def as_value(name: str, value: float) -> Any:
    return {7: value} if OPTIONS[name].kind is dict else value


def by_http(name: str, value: Any, beside: dict[str, Any]) -> tuple[GenerationRequest, str]:
    """As an OpenAI client says it, and the field's name there."""
    said = {"model": "m", **beside, name: value}
    if name == "prompt_logprobs":
        # The log-probabilities of an echoed prompt are those that `logprobs` asks for.
        said = {"model": "m", "prompt": "x", "echo": True, "logprobs": value}
        body = decode(completions.DECODER, json.dumps(said).encode())
        return completions.completion_requests(body)[0], "logprobs"
    field = name
    if name == "logprobs":
        said |= {"logprobs": True, "top_logprobs": value}
        field = "top_logprobs"
    said["messages"] = [{"role": "user", "content": "x"}]
    return chat.chat_request(
        decode(chat.DECODER, json.dumps(said).encode()), reasons=lambda name: False
    ), field


def by_grpc(name: str, value: Any, beside: dict[str, Any]) -> GenerationRequest:
    options = sampling_pb2.SamplingOptions(**{**beside, name: value})
    return grpc_face.generate_request(inference_pb2.GenerateRequest(model="m", text="x", sampling=options))


def fits(name: str, value: Any) -> bool:
    """Whether the message can hold the value at all: its integers have no sign and a size."""
    try:
        sampling_pb2.SamplingOptions(**{name: value})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(("name", "end", "beyond", "sign"), ENDS, ids=IDS)
def test_a_value_at_its_limit_is_taken_by_both_faces_and_the_engine(
    name: str, end: float, beyond: float, sign: int
) -> None:
    beside, value = BESIDE.get(name, {}), as_value(name, end)
    if (name, end) == ("top_p", 0):
        # It would keep no token.
        value = 0.01
    validate(by_http(name, value, beside)[0])
    if not fits(name, value):
        # A seed with a sign: see below.
        return
    validate(by_grpc(name, value, beside))
    options = sampling_pb2.SamplingOptions(**{"seed": 1, **beside, name: value})
    assert getattr(to_sampling(options, LIMITS, num_prompt_tokens=1), name) == value


@pytest.mark.parametrize(("name", "end", "beyond", "sign"), ENDS, ids=IDS)
def test_one_beyond_is_refused_by_name_before_a_prompt_is_looked_at(
    name: str, end: float, beyond: float, sign: int
) -> None:
    beside, value = BESIDE.get(name, {}), as_value(name, beyond)
    with pytest.raises(MillraceError) as refused:
        validate(by_http(name, value, beside)[0])
    field = by_http(name, as_value(name, end), beside)[1]
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, field)
    assert refused.value.message.startswith(f"{field}: ")
    if not fits(name, value):
        return
    with pytest.raises(MillraceError) as refused:
        validate(by_grpc(name, value, beside))
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, f"sampling.{name}")
    options = sampling_pb2.SamplingOptions(**{"seed": 1, **beside, name: value})
    with pytest.raises(MillraceError) as refused:
        to_sampling(options, LIMITS, num_prompt_tokens=1)
    assert (refused.value.reason, refused.value.field) == (Reason.INVALID_ARGUMENT, f"sampling.{name}")


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if each.kind is float])
def test_the_smallest_number_that_the_gateway_takes_the_engine_takes_too(name: str) -> None:
    tiny = max(5e-324, OPTIONS[name].limits.minimum)
    request, _ = by_http(name, tiny, {})
    validate(request)
    params = complete(request.sampling, defaults={}, max_tokens=1, eos_token_ids=())
    wire = sampling_pb2.SamplingOptions(**sampling_fields(params))
    assert getattr(to_sampling(wire, LIMITS, num_prompt_tokens=1), name) == pytest.approx(tiny)


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**64 - 1])
def test_every_seed_of_64_bits_reaches_the_engine_as_one_without_a_sign(seed: int) -> None:
    request, _ = by_http("seed", seed, {})
    validate(request)
    params = complete(request.sampling, defaults={}, max_tokens=1, eos_token_ids=())
    wire = sampling_pb2.SamplingOptions(**sampling_fields(params))
    assert to_sampling(wire, LIMITS, num_prompt_tokens=1).seed == seed % 2**64


@pytest.mark.parametrize("name", OPTIONS)
def test_what_asks_for_nothing_is_within_the_limits(name: str) -> None:
    option = OPTIONS[name]
    if isinstance(option.neutral, int | float):
        assert option.limits.contains(option.neutral)


@pytest.mark.parametrize(
    ("said", "field"),
    [
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"n": 3, "beam_width": 2}, "beam_width"),
        ({"n": 1, "best_of": 3, "beam_width": 3}, "best_of"),
    ],
)
def test_what_the_engine_would_refuse_together_the_gateway_refuses_first(
    said: dict[str, int], field: str
) -> None:
    with pytest.raises(MillraceError) as refused:
        validate(by_http("seed", 1, said)[0])
    assert refused.value.field == field
    options = sampling_pb2.SamplingOptions(seed=1, **said)  # type: ignore[arg-type]
    with pytest.raises(MillraceError) as refused:
        to_sampling(options, LIMITS, num_prompt_tokens=1)
    assert refused.value.field == f"sampling.{field}"
