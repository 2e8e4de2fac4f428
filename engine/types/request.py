"""What a client asked of the engine. Immutable; what is decoded lives in the scheduler's Sequence."""

from __future__ import annotations

import msgspec

from contract.grammar import GrammarSpec
from contract.pooling import PoolingParams
from contract.retention import Retention
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from engine.types.hand_over import BlockSource


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One submission. `request_id` is unique in the engine; `external_id` is what people see in traces."""

    request_id: int
    external_id: str
    # The client's own id, for traces.
    client_request_id: str = ""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    # Tokens of this choice that another engine generated already; generation continues after them.
    output_token_ids: tuple[int, ...] = ()
    # Index of the first choice; part of the random seed.
    choice_index: int = 0
    grammar: GrammarSpec | None = None
    # There with max_thinking_tokens.
    thinking: ThinkingTags | None = None
    # Asked of a model that pools, and of no other.
    pooling: PoolingParams | None = None
    # What the answer may forget of its keys and values; None: nothing.
    retention: Retention | None = None
    # Its prompt and first token alone are computed, and its blocks held under this ticket; empty otherwise.
    hand_over: bytes = b""
    # Where its prompt was computed; None: nowhere yet.
    source: BlockSource | None = None
    # Alternatives that a token's confidence is made of, which are in `sampling.logprobs`, too; 0 is none.
    # And alternatives of each that its client is told; None: not even the token's own log-probability.
    confidence_top: int = 0
    num_told: int | None = None
    adapter: str = ""
    tenant: str = ""
    tier: str = ""
    # A higher number is served first.
    priority: int = 0
    # Fair-share weight of the tenant inside its tier.
    weight: float = 1.0
    # Prefix-cache blocks are shared only under equal salts.
    cache_salt: bytes = b""
    arrival_s: float = 0.0
    # Moment by which the first token is due; None when the tier has no target.
    ttft_deadline_s: float | None = None
    # Seconds for each token after the first; None when the tier has no target.
    tpot_target_s: float | None = None
    # The request is refused if its first token is expected after this moment; None accepts any.
    queue_deadline_s: float | None = None
    # Moment after which nobody wants the answer.
    deadline_s: float | None = None
    # Largest prompt plus completion the tier allows; None means the model's own limit.
    max_context_tokens: int | None = None
    # W3C trace context of the parent span.
    traceparent: str = ""
    tracestate: str = ""
