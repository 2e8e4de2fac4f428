"""What the pipeline gives to the faces."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from contract.grammar import EnforcementReport, Verdict
from contract.outputs import FinishReason, TokenLogprobs
from gateway.text.delta import TextDelta


class ChoiceDelta(TextDelta, kw_only=True):
    """What one output adds to one choice."""

    index: int = 0
    token_ids: list[int] = msgspec.field(default_factory=list)
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    # On the first delta of a request that asked for them.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # On the last delta of the choice.
    finish_reason: FinishReason | None = None
    # Stop string that ended the choice.
    stop_reason: str | None = None
    # On the last delta of a complete answer whose schema was not enforced wholly.
    verdict: Verdict | None = None

    def absorb(self, later: ChoiceDelta) -> None:
        """Adds what came right after this delta of the same choice, which stays as it is."""
        self.absorb_text(later)
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.verdict = later.verdict


def by_choice(deltas: Iterable[ChoiceDelta]) -> list[ChoiceDelta]:
    """One delta per choice, for faces whose messages say once what they add to an answer."""
    found: dict[int, ChoiceDelta] = {}
    for delta in deltas:
        earlier = found.setdefault(delta.index, delta)
        if earlier is not delta:
            earlier.absorb(delta)
    return list(found.values())


class TimeToFirstToken(msgspec.Struct, frozen=True, kw_only=True):
    """Named parts in seconds; `total_s` is their sum."""

    total_s: float
    queue_s: float
    preprocess_s: float
    prefill_s: float
    first_decode_s: float
    serialize_s: float
    network_s: float


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request."""

    prompt_tokens: int
    # Of the answers that are returned, and of candidates and beams that are not.
    completion_tokens: int
    candidate_tokens: int = 0
    cached_prompt_tokens: int = 0
    reasoning_tokens: int = 0
    # None when no token was made.
    ttft: TimeToFirstToken | None = None

    @property
    def billed_tokens(self) -> int:
        """Tokens that were generated and are paid for, whether they are returned or not."""
        return self.completion_tokens + self.candidate_tokens


class AnswerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    request_id: str
    model: str
    # Version of it; "" where none is told apart.
    revision: str = ""
    # LoRA adapter that answers; "" for the base model.
    adapter: str = ""
    created_unix_s: int
    # Tier that the request is really served under.
    service_tier: str
    prompt_token_ids: tuple[int, ...]
    num_choices: int
    enforcement: EnforcementReport | None = None
