"""Which requests are accepted at all, and what those that are not are told.

The same memory plan that start-up allocated decides here: what can never fit is refused at once, with the
numbers; what would come later than its tier allows is refused early, with a retry delay. This is the only
door: nothing is accepted before it, and nothing that passed it is dropped.
"""

from __future__ import annotations

import math

from contract.errors import context_length
from engine.config import SchedulerConfig
from engine.scheduler.forecast import Forecast
from engine.scheduler.queue import WaitingQueue
from engine.types import MemoryPlan, Request, RequestFailure

# Shortest and longest retry delay that a refusal names, in seconds.
_SHORTEST_RETRY_S = 0.5
_LONGEST_RETRY_S = 60.0
# Part of the time that is left which a forecast may fill: forecasts err.
_MARGIN = 0.85
# The one for requests that cannot start as long as higher tiers come as they do: nobody knows how long that
# is, and their rate is known anew after this time.
_RETRY_BEHIND_HIGHER_S = 10.0


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


def refuse_for_now(
    request: Request, forecast: Forecast, waiting: WaitingQueue, config: SchedulerConfig, now: float
) -> RequestFailure | None:
    """The refusal of a request that has no room in the queue, would be late, or would take another tenant's
    turn; None when it is accepted. When to come back: after such a time as passed lately between requests
    of its tenant and tier that were accepted; if none were, when the excess is worked off.
    """
    own = waiting.accounts_of(request.priority).get(request.tenant)
    num_own, room = own.num_sequences if own else 0, config.max_waiting - len(waiting)
    # A queue's part of a memory that several share, as large as what is left free: so there is always room
    # for who has none, and nobody has to be pushed out (Choudhury and Hahne, "Dynamic queue length
    # thresholds for shared-memory packet switches", 1998).
    if num_own >= room:
        return _refusal(
            f"{num_own} requests of this tenant wait for this engine, which has room for {room} more",
            _retry_s(forecast.wait_s, forecast.interval_s),
            {"num_waiting": str(len(waiting)), "max_waiting": str(config.max_waiting)},
        )
    if not config.refuse_early or request.queue_deadline_s is None:
        return None
    limit_s = request.queue_deadline_s - request.arrival_s
    # A prompt that takes longer than that by itself is judged by its wait alone.
    expected_s = forecast.wait_s + (forecast.prompt_s if forecast.prompt_s < limit_s else 0.0)
    # Who finds nobody ahead gains nothing by coming later.
    is_late = bool(forecast.wait_s) and expected_s > _MARGIN * (request.queue_deadline_s - now)
    if forecast.is_its_turn and not is_late:
        return None
    if not is_late:
        expectation = "other tenants were refused and are next"
    elif forecast.wait_s == math.inf:
        expectation = "requests before it take every place that comes free"
    else:
        waited_s = now - request.arrival_s
        expectation = f"the first token is expected {waited_s + expected_s:.1f} s after the request came"
    return _refusal(
        f"{expectation}; tier {request.tier!r} allows {limit_s:.1f} s",
        _retry_s(expected_s - _MARGIN * limit_s, forecast.interval_s),
        {"expected_s": f"{expected_s:.3f}", "limit_s": f"{limit_s:.3f}"},
    )


def _retry_s(excess_s: float, interval_s: float) -> float:
    # The excess follows every burst of higher tiers; what was accepted lately errs less.
    delay_s = excess_s if interval_s == math.inf else interval_s
    if delay_s == math.inf:
        return _RETRY_BEHIND_HIGHER_S
    return min(max(_SHORTEST_RETRY_S, delay_s), _LONGEST_RETRY_S)


def _refusal(message: str, retry_s: float, metadata: dict[str, str]) -> RequestFailure:
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"{message}; try again in {retry_s:.1f} s",
        metadata=metadata,
        retry_after_s=retry_s,
    )
