"""What the pipeline needs of its callers' context, the tokenizer service, limits and the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from contract.chat import Conversation, Prompt, ResponseFormat, TextPrompt
from contract.grammar import Verdict
from contract.outputs import ChoiceStatistics
from gateway.tiers import Tier
from gateway.types.caller import Caller
from gateway.types.identity import Identity
from gateway.types.prepared import Prepared


class Callers(Protocol):
    """Knows callers by the context that the edge signed, and signs it for the services behind."""

    def verify(
        self,
        header: str | None,
        *,
        received_s: float,
        traceparent: str = "",
        tracestate: str = "",
        client_request_id: str = "",
        timeout_s: float | None = None,
    ) -> Caller:
        """The caller behind a header; `timeout_s` is the client's own deadline, from now."""
        ...

    def sign(self, caller: Caller, tier: Tier, traceparent: tuple[str, str]) -> Any:
        """The signed context under the effective tier, below the given span, ready for the wire."""
        ...


class Tokenizer(Protocol):
    """The tokenizer service; its refusals are raised."""

    async def prepare(
        self,
        *,
        model: str,
        prompt: Prompt,
        response_format: ResponseFormat | None,
        context: Any,
        tenant: str = "",
        traceparent: tuple[str, str] = ("", ""),
        timeout_s: float = ...,
        max_prompt_tokens: int = 0,
    ) -> Prepared:
        """Renders, encodes and compiles."""
        ...

    async def validate(self, model: str, schema_json: str, text: str, *, context: Any) -> Verdict:
        """Judges a finished text by a schema as it was sent."""
        ...

    async def tokenize(
        self, model: str, prompt: Conversation | TextPrompt, *, add_special_tokens: bool | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text, or of a rendered conversation."""
        ...


class Reservation(Protocol):
    """Tokens and a stream slot held for one request. The first of settle and cancel counts."""

    def remaining_completion_budget(self) -> int | None:
        """Completion tokens that the budget allows in all; None when none applies."""
        ...

    async def extend(self) -> int:
        """Reserves more; returns the tokens added."""
        ...

    async def settle(
        self, prompt_tokens: int, completion_tokens: int, *, cached_prompt_tokens: int = 0
    ) -> None:
        """Replaces what was reserved by what was used."""
        ...

    async def cancel(self) -> None:
        """Gives everything back."""
        ...


class Limiter(Protocol):
    """Reserves before generation."""

    async def reserve(
        self,
        identity: Identity,
        prompt_tokens: int,
        max_completion_tokens: int | None,
        *,
        model: str = "",
        tier: Tier | None = None,
    ) -> Reservation:
        """Raises TOKEN_RATE_EXCEEDED, CONCURRENCY_EXCEEDED or BUDGET_EXHAUSTED."""
        ...

    def headers(self, identity: Identity) -> Mapping[str, str]:
        """x-ratelimit-* headers of an answer."""
        ...


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
