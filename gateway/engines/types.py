"""What goes to engines and what comes back, in plain data. Times are seconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from contract.errors import MillraceError
from contract.grammar import GrammarSpec
from contract.outputs import ChoiceStatistics, FinishReason, FirstToken, TokenLogprobs
from contract.pooling import PoolingParams
from contract.retention import Retention
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags


class Chosen(NamedTuple):
    """How an answer came about that is one of several samples."""

    # When the first of them had its first token, in monotonic seconds.
    since_s: float
    # Mean time per token with which the sample itself was generated, after its first; None where unknown.
    tpot_s: float | None


class EngineOutput(msgspec.Struct):
    """New tokens of one choice in one step, or its end."""

    choice_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # How sure the model was of each token, where that was asked for.
    confidences: tuple[float, ...] = ()
    # Ends the whole request.
    error: MillraceError | None = None
    first_token: FirstToken | None = None
    statistics: ChoiceStatistics | None = None
    stop_token_id: int | None = None
    # Computed so far of answers that are told at the end; no news of any choice.
    withheld_tokens: int = 0
    # With the first piece of an answer that was chosen; all of them come at once.
    chosen: Chosen | None = None
    # The answer of a model that pools, little-endian float32.
    pooled: bytes = b""


class SubmittedText(msgspec.Struct, frozen=True):
    """One text for a model that pools."""

    # Its place in the request; its output has it as the choice.
    index: int
    token_ids: tuple[int, ...]
    # Where the second text of a pair begins; 0 where there is none.
    second_start: int = 0


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine gets it."""

    # Signed request context, ready for the wire (runtime.context.sign).
    context: Any
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    grammar: GrammarSpec | None = None
    # Asked of a model that pools: the same of each of the texts, whose ids follow one another in the prompt.
    pooling: PoolingParams | None = None
    texts: tuple[SubmittedText, ...] = ()
    # There with max_thinking_tokens.
    thinking: ThinkingTags | None = None
    # What the answer may forget; None: nothing.
    retention: Retention | None = None
    # Alternatives of a token that its confidence is made of; 0 asks for none.
    confidence_top: int = 0
    # The request's id in traces and logs.
    request_id: str = ""
    # Its row in the ledger; engines say it again if this gateway goes.
    entry_id: str = ""
    # Tokens that were generated already, on another engine.
    output_token_ids: tuple[int, ...] = ()
    # The prompt and the first token alone are wanted, and its blocks held under this ticket; empty otherwise.
    hand_over: bytes = b""
    # (address, ticket) of the engine that has computed the prompt; None: none has.
    source: tuple[str, bytes] | None = None
    # Choice that alone is submitted; the first one otherwise.
    choice_index: int = 0
    # Separates prefix caches; part of the routing hash.
    cache_salt: bytes = b""
    # LoRA adapter that the engine must serve; "" for the base model.
    adapter: str = ""
    # Version of it that computes this, and no other; set when it is sent.
    adapter_version: str = ""
    # Requests with the same one had better meet on one engine; "" says nothing.
    affinity: str = ""
    # Label that the engine must have; "" takes every engine.
    pool: str = ""
    # Version of the model that the engine must serve, as `contract.engines.model_key` writes it.
    model: str = ""
    # Path of its checkpoint, which engines' hashes of prefixes begin with.
    checkpoint: str = ""


class EngineState(StrEnum):
    """Where an attachment stands."""

    CONNECTING = "connecting"
    READY = "ready"
    # Finishes what it has and takes nothing new.
    DRAINING = "draining"
    # Decodes with another vocabulary, or serves another model; never used.
    INCOMPATIBLE = "incompatible"
