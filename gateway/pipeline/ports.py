"""What is kept of a request that has ended, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from contract.outputs import ChoiceStatistics
from gateway.types.identity import Identity


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is kept of a request when it has ended. Times are seconds, moments Unix seconds."""

    identity: Identity
    model: str
    tier: str
    face: str
    # Finish reason of the first choice in lower case, or a reason of the error table.
    outcome: str
    ended_unix_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    num_choices: int
    num_engines_lost: int
    # Of all choices, on every engine.
    statistics: ChoiceStatistics
    queue_s: float
    ttft_s: float | None
    duration_s: float
    metadata: Mapping[str, str]


class Ledger(Protocol):
    """Where finished requests are written; never blocks."""

    def record(self, request: FinishedRequest) -> None:
        """Takes one finished request."""
        ...
