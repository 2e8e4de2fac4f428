"""What is kept of a request that has ended, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is kept of a request that has ended, as the ledger calls it. Times in milliseconds."""

    request_id: str
    ended_unix_ms: int
    tenant: str
    key_id: str
    tier: str
    model: str
    face: str
    # Finish reason of the first choice in lower case, or a reason of the error table.
    outcome: str
    prompt_tokens: int
    cached_prompt_tokens: int
    # Of the answers that were returned, and of candidates and beams that were not.
    completion_tokens: int
    candidate_tokens: int
    reasoning_tokens: int
    num_choices: int
    num_engines_lost: int
    # Of all choices, on every engine.
    speculative_waste_tokens: int
    recomputed_tokens: int
    num_preemptions: int
    grammar_ms: float
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    labels: Mapping[str, str]


class Ledger(Protocol):
    """Where finished requests are written; never blocks."""

    def record(self, request: FinishedRequest) -> None:
        """Takes one finished request."""
        ...
