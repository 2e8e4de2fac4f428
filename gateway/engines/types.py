"""What goes to engines and what comes back, in plain data. Times are seconds."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from services.errors import MillraceError


class FinishReason(IntEnum):
    """Why a choice ended. Numbers equal those of millrace.common.v1.FinishReason."""

    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    CANCELLED = 4
    DEADLINE = 5
    ERROR = 6
    BUDGET = 7


class CancelReason(IntEnum):
    """Why the gateway cancels. Numbers equal those of millrace.engine.v1.CancelReason."""

    CLIENT = 1
    DEADLINE = 2
    STOP_STRING = 3
    BUDGET = 4


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability (natural) of a token; `top` holds (id, log-probability) of alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class FirstToken(msgspec.Struct, frozen=True):
    """Where the engine's part of the time to the first token went."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_decode_s: float = 0.0
    cached_prompt_tokens: int = 0
    num_prefill_chunks: int = 0


class ChoiceStatistics(msgspec.Struct, frozen=True):
    """What one choice took on one engine."""

    num_steps: int = 0
    num_preemptions: int = 0
    recomputed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_s: float = 0.0
    grammar_s: float = 0.0
    delayed_by_s: dict[str, float] = {}


class EngineOutput(msgspec.Struct):
    """New tokens of one choice in one step, or its end."""

    choice_index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    # Ends the whole request.
    error: MillraceError | None = None
    first_token: FirstToken | None = None
    statistics: ChoiceStatistics | None = None
    stop_token_id: int | None = None


class Grammar(msgspec.Struct, frozen=True):
    """A compiled output constraint, opaque to the gateway."""

    digest: str
    payload: bytes
    backend: str


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen, complete: the defaults of the checkpoint and of the API are applied."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    # 0 keeps all tokens.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # 0 samples.
    beam_width: int = 0


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One request as an engine gets it."""

    # Signed request context, ready for the wire (services.context.sign).
    context: Any
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    grammar: Grammar | None = None
    # What people see in traces and logs.
    request_id: str = ""
    # Tokens that were generated already, on another engine.
    output_token_ids: tuple[int, ...] = ()
    # Choice that alone is submitted; the first one otherwise.
    choice_index: int = 0
    # Separates prefix caches; part of the routing hash.
    cache_salt: bytes = b""
    # LoRA adapter that the engine must serve; "" for the base model.
    adapter: str = ""
    # Requests with the same one had better meet on one engine; "" says nothing.
    affinity: str = ""
    # Label that the engine must have; "" takes every engine.
    pool: str = ""


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine said of itself when it was attached."""

    engine_id: str
    model: str
    vocabulary_fingerprint: str
    max_model_len: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    # Adapters that it serves beside the base model.
    adapters: tuple[str, ...] = ()
    # Label that its operator gave it, for routing.
    pool: str = ""


class EngineLoad(msgspec.Struct, frozen=True):
    """An engine's last report; rides on every step and comes once a second when it is idle."""

    num_running: int = 0
    num_waiting: int = 0
    pending_prefill_tokens: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    oldest_wait_s: float = 0.0
    draining: bool = False


class KvEvent(msgspec.Struct, frozen=True):
    """Prefix blocks that an engine stored after `parent_hash`, or dropped."""

    block_hashes: tuple[int, ...]
    stored: bool
    # Hash of the block before the first one; 0 at the start of a prompt.
    parent_hash: int = 0


class EngineState(StrEnum):
    """Where an attachment stands."""

    CONNECTING = "connecting"
    READY = "ready"
    # Finishes what it has and takes nothing new.
    DRAINING = "draining"
    # Decodes with another vocabulary, or serves another model; never used.
    INCOMPATIBLE = "incompatible"


def merged(first: Mapping[str, float], second: Mapping[str, float]) -> dict[str, float]:
    """Sum of two named counts."""
    result = dict(first)
    for name, value in second.items():
        result[name] = result.get(name, 0.0) + value
    return result
