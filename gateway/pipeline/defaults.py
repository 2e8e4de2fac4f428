"""From what the client set to complete sampling options: checkpoint's defaults, seed, and what fits."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from contract.errors import MillraceError, Reason, context_length, invalid
from contract.sampling import OPTIONS, SamplingOptions, SamplingParams, check
from gateway.types.request import GenerationRequest

_log = logging.getLogger(__name__)

# Numbers that a checkpoint's generation_config.json may set.
_CHECKPOINT_OPTIONS: Mapping[str, Any] = {
    name: each.kind
    for name, each in OPTIONS.items()
    if each.limits.per == "token" and each.kind in (int, float)
}


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options that the checkpoint recommends.

    With `do_sample` false the numbers in the file are leftovers that transformers ignores, and so do we;
    clients that name no temperature get the API's own default then. A number beyond its limits is left out,
    which is logged: every request would be refused for it.
    """
    if generation_config.get("do_sample") is False:
        return {}
    found: dict[str, Any] = {}
    for name, kind in _CHECKPOINT_OPTIONS.items():
        value = generation_config.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                check(SamplingParams(**{name: kind(value)}), invalid)
            except MillraceError as error:
                _log.warning("generation_config.json is not followed: %s", error.message)
            else:
                found[name] = kind(value)
    return found


def token_limit(max_model_len: int, max_context_tokens: int | None) -> int:
    """Longest prompt plus completion: the model's limit, or the tier's when that is lower."""
    return max_model_len if max_context_tokens is None else min(max_model_len, max_context_tokens)


def completion_limit(request: GenerationRequest, num_prompt_tokens: int, limit: int) -> int:
    """Tokens that may be generated per choice; raises CONTEXT_LENGTH_EXCEEDED with the numbers."""
    asked = request.sampling.max_tokens
    room = limit - num_prompt_tokens
    if room >= 1 and (asked is None or asked <= room):
        return room if asked is None else asked
    metadata = {"prompt_tokens": str(num_prompt_tokens), "max_context_tokens": str(limit)}
    if room < 1:
        field = request.field("prompt")
        problem = f"the prompt has {num_prompt_tokens} tokens, and the completion needs at least 1; "
        problem += "shorten the prompt"
    else:
        field, metadata["max_tokens"] = request.field("max_tokens"), str(asked)
        problem = f"the prompt has {num_prompt_tokens} tokens and {asked} more were asked for; "
        problem += f"ask for at most {room}, or shorten the prompt"
    raise MillraceError(
        Reason.CONTEXT_LENGTH_EXCEEDED, context_length(limit, problem), field=field, metadata=metadata
    )


def complete(
    sampling: SamplingOptions,
    *,
    checkpoint: Mapping[str, Any],
    max_tokens: int,
    eos_token_ids: tuple[int, ...],
) -> SamplingParams:
    """Every option set. Without a seed a random one is taken, so that an interrupted request can continue."""
    n = sampling.n or 1
    ends = () if sampling.ignore_eos else eos_token_ids
    options: dict[str, Any] = {
        "seed": secrets.randbits(63) if sampling.seed is None else sampling.seed,
        "best_of": n,
        **checkpoint,
        **sampling.given(),
        # The step that computes the prompt always samples; the token is dropped when none was asked for.
        "max_tokens": max(max_tokens, 1),
    }
    return SamplingParams(
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=sampling.allowed_token_ids,
        stop_token_ids=tuple(dict.fromkeys((*ends, *sampling.stop_token_ids))),
        **options,
    )


def shortened(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same for answers of at most so many tokens."""
    return replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))
