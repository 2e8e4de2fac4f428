"""What the pipeline gives to the faces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from contract.grammar import EnforcementReport, Verdict
from contract.outputs import ChoiceStatistics, FinishReason, FirstToken, TokenLogprobs
from gateway.engines.types import EngineOutput
from gateway.text.delta import TextDelta
from gateway.text.detokenizer import Detokenizer


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


class Echo(NamedTuple):
    """The prompt as every choice begins with it."""

    # What of it is certain: the beginning of a character that its last tokens have is not.
    text: str
    # What has read the prompt's tokens; copies of it read the answer's, which may complete that character.
    reader: Detokenizer


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
    # Where it was asked for.
    echo: Echo | None = None


# What one request took: tokens, time, and what its engines reported.


class Meter:
    """Counts along the life of one request. Moments are monotonic seconds.

    `observe_gap` is told the time between every two outputs that have tokens.
    """

    def __init__(
        self, received_s: float, observe_gap: Callable[[float], None], submitted_s: float | None = None
    ) -> None:
        self.received_s = received_s
        self._observe_gap = observe_gap
        # When it was handed to an engine.
        self.submitted_s = submitted_s
        # When the first output came, and when its chunk was written.
        self.first_output_s: float | None = None
        self.first_written_s: float | None = None
        self.last_output_s = received_s
        self.first_token = FirstToken()
        # An engine has computed something.
        self.has_worked = False
        self.completion_tokens = 0
        self.longest_gap_s = 0.0
        self.statistics = ChoiceStatistics()
        # Computed so far of answers that are told at the end, until they are.
        self.withheld_tokens = 0

    def count(self, output: EngineOutput, now_s: float) -> None:
        """Takes the numbers of one output."""
        self.withheld_tokens = output.withheld_tokens
        if output.withheld_tokens:
            return
        if self.first_output_s is None:
            self.first_output_s = now_s
            if output.first_token is not None:
                self.first_token = output.first_token
        elif output.token_ids:
            gap_s = now_s - self.last_output_s
            self._observe_gap(gap_s)
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        self.last_output_s = now_s
        self.completion_tokens += len(output.token_ids)
        if output.statistics is not None:
            self.statistics.add(output.statistics)
            self.has_worked |= output.statistics.num_steps > 0
        self.has_worked |= bool(output.token_ids)

    @property
    def engine_ttft_s(self) -> float | None:
        """From the submission to the first output."""
        if self.first_output_s is None or self.submitted_s is None:
            return None
        return self.first_output_s - self.submitted_s

    def ttft(self) -> TimeToFirstToken | None:
        """The parts of the time to the first token, once there is one.

        Network is what the named parts leave over: the way to the engine and back.
        """
        if self.first_output_s is None or self.submitted_s is None:
            return None
        written_s = self.first_written_s or time.monotonic()
        preprocess_s = self.submitted_s - self.received_s
        serialize_s = written_s - self.first_output_s
        first = self.first_token
        engine_s = first.queue_s + first.prefill_s + first.first_decode_s
        network_s = max(0.0, self.first_output_s - self.submitted_s - engine_s)
        return TimeToFirstToken(
            # The sum of the parts, by definition; equals written - received up to the clocks' ticks.
            total_s=preprocess_s + engine_s + network_s + serialize_s,
            queue_s=first.queue_s,
            preprocess_s=preprocess_s,
            prefill_s=first.prefill_s,
            first_decode_s=first.first_decode_s,
            serialize_s=serialize_s,
            network_s=network_s,
        )

    def tpot_s(self, num_choices: int) -> float | None:
        """Mean time per output token of a choice after its first; None with fewer than two."""
        if self.first_output_s is None or self.completion_tokens <= num_choices:
            return None
        steps = self.completion_tokens / num_choices - 1
        return (self.last_output_s - self.first_output_s) / steps
