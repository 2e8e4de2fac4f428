"""Chooses the engine for a request: the least work before its first token, prefix-cache hits counted."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from contract.engines import EngineLoad
from gateway.config import RoutingConfig
from gateway.engines.types import Submission


class RouteReason(StrEnum):
    """Why an engine was chosen."""

    # There was no other.
    ONLY = "only"
    # It had the least work ahead.
    LEAST_PENDING = "least_pending"
    # The blocks of the prompt that the engine has in its cache outweighed the work ahead of it.
    PREFIX = "prefix"
    # The client's prompt cache key leads there.
    AFFINITY = "affinity"


class RouteCandidate(msgspec.Struct, frozen=True):
    """What the choice depends on, for one engine. Tokens are prompt tokens unless the name says otherwise."""

    # Prompt tokens ahead of a new request.
    pending_tokens: int
    # Requests that are running or waiting.
    num_requests: int
    # Leading tokens of the prompt that the engine holds.
    cached_tokens: int = 0
    # Share of KV blocks in use, 0 to 1.
    kv_usage: float = 0.0
    # The prompt cache key of the request leads here.
    is_home: bool = False
    # The request's adapter must be loaded first.
    is_cold: bool = False
    # Serves long prompts only.
    long_lane: bool = False
    # Grows each time the engine is chosen; the smaller one wins a tie.
    last_chosen: int = 0


# Worth of a prompt cache key in prompt tokens: requests that share one probably share more than is
# known here.
_HOME_TOKENS = 512.0
# Cost of loading an adapter in prompt tokens; the adapter whose slot it gets must be loaded again, too.
# More than home is worth: who has it is preferred to where its name leads, and nobody takes turns.
_TOKENS_OF_COLD_ADAPTER = 2 * _HOME_TOKENS
# Cost of one running request for a new one, in prompt tokens: its share of every step.
_TOKENS_PER_RUNNING_REQUEST = 64.0
# Added at full KV cache, where preemption threatens; grows with the square of the usage.
_TOKENS_AT_FULL_CACHE = 2048.0


class RouteChoice(msgspec.Struct, frozen=True):
    """Which candidate, and why."""

    index: int
    reason: RouteReason


def choose(candidates: Sequence[RouteCandidate], prompt_tokens: int, config: RoutingConfig) -> RouteChoice:
    """The cheapest candidate; among equals the one that was chosen longest ago."""
    lane = _lane(candidates, prompt_tokens, config)
    if len(lane) == 1:
        return RouteChoice(lane[0], RouteReason.ONLY)
    least_pending = min(candidates[index].pending_tokens for index in lane)
    allowed = least_pending + config.prefix_imbalance_tokens

    def cost(index: int, *, with_prefix: bool, with_home: bool) -> tuple[float, int]:
        candidate = candidates[index]
        near = candidate.pending_tokens <= allowed
        own = max(prompt_tokens - (candidate.cached_tokens if with_prefix and near else 0), 1)
        total = (
            candidate.pending_tokens
            + own
            - (_HOME_TOKENS if with_home and near and candidate.is_home else 0.0)
            + (_TOKENS_OF_COLD_ADAPTER if candidate.is_cold else 0.0)
            + candidate.num_requests * _TOKENS_PER_RUNNING_REQUEST
            + candidate.kv_usage**2 * _TOKENS_AT_FULL_CACHE
        )
        return total, candidate.last_chosen

    best = min(lane, key=lambda index: cost(index, with_prefix=True, with_home=True))
    if best == min(lane, key=lambda index: cost(index, with_prefix=False, with_home=False)):
        return RouteChoice(best, RouteReason.LEAST_PENDING)
    if best == min(lane, key=lambda index: cost(index, with_prefix=True, with_home=False)):
        return RouteChoice(best, RouteReason.PREFIX)
    return RouteChoice(best, RouteReason.AFFINITY)


def _lane(candidates: Sequence[RouteCandidate], prompt_tokens: int, config: RoutingConfig) -> list[int]:
    """Indices of the engines for this length; all of them when its lane is empty."""
    everyone = list(range(len(candidates)))
    if not config.long_prompt_tokens:
        return everyone
    uncached = prompt_tokens - max(candidate.cached_tokens for candidate in candidates)
    is_long = uncached >= config.long_prompt_tokens
    return [index for index in everyone if candidates[index].long_lane is is_long] or everyone


# Prompts that are computed by one engine and answered by another.

PREFILL, DECODE = "prefill", "decode"
# A first token may take so much longer elsewhere, where answers of others are spared by it: beside the prompt
# they would be slower for as long as it is computed.
_SPARED = 1.5


def can_be_split(submission: Submission) -> bool:
    """Whether one engine can go on with what another one has begun: one choice, of which more than a token is
    wanted, and nothing that only the engine knows which computed the prompt.
    """
    sampling = submission.sampling
    return (
        sampling.n == 1
        and not sampling.ranks_at_the_end
        and sampling.prompt_logprobs is None
        and sampling.max_tokens > 1
        and submission.pooling is None
        and not submission.output_token_ids
        and (submission.retention is None or not submission.retention.forgets)
    )


def seconds_to_first(candidate: RouteCandidate, load: EngineLoad, prompt_tokens: int) -> float:
    """Until an engine is through with a prompt, by what is ahead of it; 0 while its speed is not known."""
    work = candidate.pending_tokens + prompt_tokens - candidate.cached_tokens
    return work / load.prefill_tokens_per_s if load.prefill_tokens_per_s else 0.0


def pays(first_s: float, moves_s: float, alone_s: float, *, num_running: int) -> bool:
    """Whether a prompt had better be computed elsewhere: `first_s` until its first token there, `moves_s` for
    handing it over, `alone_s` until its first token on the engine that answers `num_running` others.
    """
    return first_s + moves_s <= alone_s * (_SPARED if num_running else 1.0)
