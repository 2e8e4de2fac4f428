"""What is kept of a request that has ended, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import msgspec

from contract.outputs import EngineTime
from gateway.limits.limiter import Charges

# Outcome of a request whose gateway was killed.
INTERRUPTED = "interrupted"


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is kept of a request that has ended, as the ledger calls it. Times in milliseconds."""

    # Id of the ledger's row; no two requests have the same.
    entry_id: str
    request_id: str
    ended_unix_ms: int
    tenant: str
    key_id: str
    tier: str
    model: str
    # Version of the model; "" where none is told apart.
    revision: str = ""
    face: str
    # The client's own id, and how often it had sent the request before, by its own word.
    client_request_id: str = ""
    num_retries: int = 0
    # Kind of output constraint, "" without one; LoRA adapter, "" for the base model.
    guided: str = ""
    adapter: str = ""
    # Special ways that it was computed by (grammar, beams and so on), for sums of cost; see books.path_of.
    path: str = ""
    # Finish reason of the first choice in lower case, or a reason of the error table.
    outcome: str
    num_choices: int
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    # Tokens of the answers that were returned; then of candidates and beams, which were not.
    completion_tokens: int = 0
    candidate_tokens: int = 0
    # Generated beyond them, sent to nobody and paid for by nobody: they were on their way when the client
    # left, or came after the end of an answer.
    unclaimed_tokens: int = 0
    reasoning_tokens: int = 0
    num_engines_lost: int = 0
    # Sums over all choices and engines.
    speculative_waste_tokens: int = 0
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    # Sum over the engines that reported it: one that died before has not.
    engine_time: EngineTime = msgspec.field(default_factory=EngineTime)
    grammar_ms: float = 0.0
    queue_ms: float = 0.0
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    labels: Mapping[str, str]

    @property
    def billed_tokens(self) -> int:
        """Tokens that were generated and are paid for, whether they were returned or not."""
        return self.completion_tokens + self.candidate_tokens


class Progress(NamedTuple):
    """What has been used of a request so far, and its outcome if it is known."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    candidate_tokens: int = 0
    outcome: str = INTERRUPTED


class OpenEntry(Protocol):
    """A request that the ledger knows to be running."""

    # The row is written under this id.
    entry_id: str

    def record(self, progress: Progress) -> None:
        """Keeps what has been used once the next chunk is sent; to be called before it leaves."""
        ...

    def extended(self) -> None:
        """Keeps that more is held of the limits."""
        ...

    def settled(self) -> None:
        """Nothing is held of the limits any more."""
        ...


class Unkept:
    """A running request of which no journal is kept."""

    def __init__(self, entry_id: str) -> None:
        self.entry_id = entry_id

    def record(self, progress: Progress) -> None:
        """Drops it."""

    def extended(self) -> None:
        """Drops it."""

    def settled(self) -> None:
        """Drops it."""


class Ledger(Protocol):
    """Where requests are written; never blocks."""

    def begin(self, request: FinishedRequest, charges: Charges) -> OpenEntry:
        """Takes a request that is accepted, as it stands if nothing more is heard of it, and what it holds of
        the limits. Its `ended_unix_ms` is the moment at which it began.
        """
        ...

    def record(self, request: FinishedRequest) -> None:
        """Takes one finished request."""
        ...
