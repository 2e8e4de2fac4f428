"""Which requests are accepted at all, and what those that are not are told.

The same memory plan that start-up allocated decides here: what can never fit is refused at once, with the
numbers; what would wait longer than its tier allows is refused early, with a retry delay.
"""

from __future__ import annotations

from contract.errors import context_length
from engine.types import MemoryPlan, Request, RequestFailure

# Longest retry delay that a refusal names, in seconds.
_LONGEST_RETRY_S = 60.0


def tokens_limit(request: Request, memory: MemoryPlan) -> int:
    """Longest prompt plus completion of the request: model, tier and max_tokens, in tokens."""
    limit = memory.max_model_len
    if request.max_context_tokens is not None:
        limit = min(limit, request.max_context_tokens)
    return min(limit, len(request.prompt_token_ids) + request.sampling.max_tokens)


def refuse_impossible(request: Request, memory: MemoryPlan, max_num_seqs: int) -> RequestFailure | None:
    """The refusal of a request that can never be served, with the numbers; None when it can."""
    num_prompt = len(request.prompt_token_ids)
    num_known = num_prompt + len(request.output_token_ids)
    if num_prompt == 0:
        return RequestFailure(
            reason="INVALID_ARGUMENT",
            field="prompt",
            message="the prompt has no tokens; at least 1 is needed",
        )
    tier_limit = request.max_context_tokens
    limit = memory.max_model_len if tier_limit is None else min(memory.max_model_len, tier_limit)
    if num_known + 1 > limit:
        whose = "" if limit == memory.max_model_len else f" under the tier {request.tier!r}"
        return RequestFailure(
            reason="CONTEXT_LENGTH_EXCEEDED",
            field="prompt",
            message=context_length(
                limit,
                f"the prompt has {num_known} tokens{whose}, and at least 1 must be left for the answer; "
                f"shorten the prompt by {num_known + 1 - limit} tokens",
            ),
            metadata={"prompt_tokens": str(num_known), "limit_tokens": str(limit)},
        )
    # The last token is never fed back, so it needs no slot.
    num_blocks = -(-(tokens_limit(request, memory) - 1) // memory.block_size)
    width = max(1, request.sampling.beam_width)
    if num_blocks * width > memory.num_blocks or width > max_num_seqs:
        return _never_fits(request, memory, num_blocks * width)
    return None


def _never_fits(request: Request, memory: MemoryPlan, num_blocks: int) -> RequestFailure:
    needed = num_blocks * memory.block_size * memory.kv_bytes_per_token
    return RequestFailure(
        reason="NEVER_FITS",
        field="max_tokens",
        message=f"prompt ({len(request.prompt_token_ids)} tokens) and max_tokens "
        f"({request.sampling.max_tokens}) need {num_blocks} KV blocks of {memory.block_size} tokens "
        f"({needed} bytes); the engine has {memory.num_blocks} ({memory.kv_cache_bytes} bytes) in all; "
        "lower max_tokens or shorten the prompt",
        metadata={
            "needed_blocks": str(num_blocks),
            "total_blocks": str(memory.num_blocks),
            "block_size": str(memory.block_size),
            "needed_bytes": str(needed),
            "kv_cache_bytes": str(memory.kv_cache_bytes),
        },
    )


def queue_full(num_waiting: int, limit: int, wait_s: float) -> RequestFailure:
    """The refusal when the queue holds as many requests as it may."""
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"{num_waiting} requests wait for this engine; the limit is {limit}; retry later",
        metadata={"num_waiting": str(num_waiting), "max_waiting": str(limit)},
        retry_after_s=min(max(1.0, wait_s), _LONGEST_RETRY_S),
    )


def would_wait_too_long(request: Request, wait_s: float, limit_s: float) -> RequestFailure:
    """The refusal of a request whose expected wait exceeds its tier's queue limit; inf is no start at all."""
    retry_s = min(max(wait_s - limit_s, 0.5), _LONGEST_RETRY_S)
    if wait_s == float("inf"):
        expectation = "higher tiers take every place that comes free"
    else:
        expectation = f"the expected wait is {wait_s:.1f} s"
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"{expectation}; tier {request.tier!r} allows {limit_s:.1f} s in the queue; retry in "
        f"{retry_s:.1f} s",
        metadata={"expected_wait_s": f"{wait_s:.3f}", "queue_limit_s": f"{limit_s:.3f}"},
        retry_after_s=retry_s,
    )
