"""A request of the suite as what vLLM is asked: one call per choice, with ids in and out.

Requests are plain data here (`engine.types.Request` as msgpack gives it).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

# Key under which a grammar of the suite travels to vLLM's own processes.
GRAMMAR_KEY = "millrace_grammar"

# Options that are asked of vLLM in another way than by their names, or not at all.
_OF_OURS = frozenset(
    {
        *("n", "best_of", "beam_width", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("logit_bias", "allowed_token_ids", "prompt_logprobs", "max_thinking_tokens"),
    }
)


@dataclass(slots=True)
class CoreCall:
    """One choice as vLLM gets it."""

    key: str
    prompt_token_ids: list[int]
    # Keyword arguments of vLLM's SamplingParams; unused where it pools.
    sampling: dict[str, Any]
    cache_salt: str | None
    adapter: str
    # The smaller one is served first.
    priority: int
    # The smaller one is served first among equals; set by `FairOrder`.
    start_tag: float = 0.0
    # A serialized llguidance grammar, a budget of thoughts, or both, with the tokens that they have seen.
    grammar: str = ""
    # Where this choice's events go.
    request_id: int = 0
    choice_index: int = 0
    prompt_logprobs: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    # contract.pooling.PoolingParams, of a model that pools.
    pooling: dict[str, Any] | None = None


def seed_of(seed: int, choice_index: int, position: int) -> int:
    """The seed of vLLM's generator for a choice that begins at an output position.

    vLLM draws from one generator per request, from its start: another choice, and the rest of an answer that
    another engine began, must not repeat its draws.
    """
    packed = b"".join(each.to_bytes(8, "little") for each in (seed, choice_index, position))
    return int.from_bytes(blake2b(packed, digest_size=8).digest(), "little") >> 1


def calls_of(request: dict[str, Any], max_model_len: int, eos_token_ids: tuple[int, ...]) -> list[CoreCall]:
    """One call for each choice of a request."""
    count = request["sampling"]["n"]
    first = request["choice_index"]
    calls = []
    for index in range(first, first + count):
        sampling = _sampling(request, index, max_model_len, eos_token_ids)
        if index > first:
            # The first choice reports the prompt.
            sampling.pop("prompt_logprobs", None)
        calls.append(
            CoreCall(
                key=f"{request['request_id']}.{index}",
                prompt_token_ids=[*request["prompt_token_ids"], *request["output_token_ids"]],
                sampling=sampling,
                cache_salt=request["cache_salt"].hex() or None,
                adapter=request["adapter"],
                priority=-request["priority"],
                grammar=_grammar(request),
                request_id=request["request_id"],
                choice_index=index,
                prompt_logprobs=sampling.get("prompt_logprobs"),
                stop_token_ids=frozenset(sampling["stop_token_ids"]),
                pooling=request["pooling"],
            )
        )
    return calls


def _sampling(
    request: dict[str, Any], choice_index: int, max_model_len: int, eos_token_ids: tuple[int, ...]
) -> dict[str, Any]:
    options, known = request["sampling"], request["output_token_ids"]
    limit = request["max_context_tokens"] or max_model_len
    capacity = min(limit, max_model_len) - len(request["prompt_token_ids"])
    stops = list(options["stop_token_ids"])
    if request["grammar"] is not None:
        # A grammar ends a choice whatever ignore_eos says; vLLM recognizes its end by the stop token.
        stops += [each for each in eos_token_ids if each not in stops]
    # The others have vLLM's own names, and mean the same.
    chosen = {name: value for name, value in options.items() if name not in _OF_OURS}
    max_tokens = max(1, min(options["max_tokens"], capacity) - len(known))
    chosen |= {
        "max_tokens": max_tokens,
        # vLLM refuses more than that.
        "min_tokens": max(0, min(options["min_tokens"] - len(known), max_tokens)),
        "stop_token_ids": stops,
        # The list above says it all.
        "ignore_eos": True,
        "detokenize": False,
    }
    if options["temperature"]:
        chosen["seed"] = seed_of(options["seed"], choice_index, len(known))
    bias = _bias(options, known)
    if bias:
        chosen["logit_bias"] = bias
    if options["allowed_token_ids"]:
        chosen["allowed_token_ids"] = list(options["allowed_token_ids"])
    if options["prompt_logprobs"] is not None:
        chosen["prompt_logprobs"] = options["prompt_logprobs"]
    return chosen


def _bias(options: dict[str, Any], known: list[int]) -> dict[int, float]:
    """The client's bias, and what penalties owe to output that vLLM takes for a part of the prompt."""
    bias = {int(token): float(value) for token, value in options["logit_bias"].items()}
    presence, frequency = options["presence_penalty"], options["frequency_penalty"]
    if known and (presence or frequency):
        for token, count in Counter(known).items():
            bias[token] = bias.get(token, 0.0) - presence - frequency * count
    return bias


def _grammar(request: dict[str, Any]) -> str:
    grammar, tags = request["grammar"], request["thinking"]
    if grammar is None and tags is None:
        return ""
    thinking = None
    if tags is not None:
        # All that a thought has to know of the prompt is how it ends.
        budget, prompt = request["sampling"]["max_thinking_tokens"], list(request["prompt_token_ids"][-1:])
        thinking = {"tags": tags, "budget": budget, "prompt": prompt}
    payload = "" if grammar is None else grammar["payload"].decode()
    known = list(request["output_token_ids"])
    return json.dumps({GRAMMAR_KEY: payload, "thinking": thinking, "replay": known})
