"""Chooses the engine for a request: the least work before its first token, prefix-cache hits counted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Candidate(msgspec.Struct, frozen=True):
    """What the choice depends on, for one engine. Tokens are prompt tokens unless the name says otherwise."""

    # Prompt tokens ahead of a new request.
    pending_tokens: int
    # Requests that are running or waiting.
    num_requests: int
    # Leading tokens of the prompt that the engine holds.
    cached_tokens: int = 0
    # Share of KV blocks in use, 0 to 1.
    kv_usage: float = 0.0
    # Grows each time the engine is chosen; the smaller one wins a tie.
    last_chosen: int = 0


class RoutingWeights(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.routing]`: what a request costs, in prompt tokens to compute."""

    # What one running request costs a new one: its share of every step.
    tokens_per_running_request: float = 64.0
    # Added at full KV cache, where preemption threatens; grows with the square of the usage.
    tokens_at_full_cache: float = 2048.0


def cost(candidate: Candidate, prompt_tokens: int, weights: RoutingWeights) -> float:
    """Work until the request's first token, in prompt tokens."""
    own = max(prompt_tokens - candidate.cached_tokens, 1)
    return (
        candidate.pending_tokens
        + own
        + candidate.num_requests * weights.tokens_per_running_request
        + candidate.kv_usage**2 * weights.tokens_at_full_cache
    )


def choose(candidates: Sequence[Candidate], prompt_tokens: int, weights: RoutingWeights) -> int:
    """Index of the cheapest candidate; among equals the one that was chosen longest ago."""
    return min(
        range(len(candidates)),
        key=lambda index: (
            cost(candidates[index], prompt_tokens, weights),
            candidates[index].last_chosen,
        ),
    )
