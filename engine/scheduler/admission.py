"""Which requests are accepted at all, and how long a new one would wait.

The same memory plan that start-up allocated decides here: what can never fit is refused at once, with the
numbers; what would wait longer than its tier allows is refused early, with a retry delay.
"""

from __future__ import annotations

from collections import deque

from engine.types import MemoryPlan, Request, RequestFailure

_WINDOW = 64


class CompletionPace:
    """Admissions per second of each tier over its last few, for estimates of the wait."""

    def __init__(self) -> None:
        self._admissions: dict[int, deque[float]] = {}
        self._backlog_since: dict[int, float] = {}

    def admitted(self, priority: int, now: float, *, backlog: bool) -> None:
        """One sequence of the tier left the queue; `backlog` says whether others of it still wait."""
        history = self._admissions.setdefault(priority, deque(maxlen=_WINDOW))
        if not backlog:
            # Nobody waited: the pace of arrivals says nothing about the pace of service.
            history.clear()
            self._backlog_since.pop(priority, None)
            return
        self._backlog_since.setdefault(priority, now)
        history.append(now)

    def waiting(self, priority: int, now: float) -> None:
        """A request of the tier starts to wait."""
        self._backlog_since.setdefault(priority, now)

    def expected_wait_s(self, priority: int, num_ahead: int, now: float) -> float | None:
        """Wait of a request behind `num_ahead` others of its tier; None while nothing is known."""
        since = self._backlog_since.get(priority)
        if since is None or num_ahead == 0:
            return 0.0 if num_ahead == 0 else None
        history = self._admissions.get(priority, deque())
        start = history[0] if len(history) == _WINDOW else since
        elapsed = now - start
        if not history:
            # Nobody of this tier was admitted since the backlog began: waiting so far is all we know.
            return elapsed * (num_ahead + 1) if elapsed > 0 else None
        return None if elapsed <= 0 else (num_ahead + 1) * elapsed / len(history)


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
        whose = "the model's" if limit == memory.max_model_len else f"the tier {request.tier!r}'s"
        return RequestFailure(
            reason="CONTEXT_LENGTH_EXCEEDED",
            field="prompt",
            message=f"the prompt has {num_known} tokens; {whose} limit is {limit} tokens, of which at least "
            f"1 must be left for the answer; shorten the prompt by {num_known + 1 - limit} tokens",
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


def queue_full(num_waiting: int, limit: int, wait_s: float | None) -> RequestFailure:
    """The refusal when the queue holds as many requests as it may."""
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"{num_waiting} requests wait for this engine; the limit is {limit}; retry later",
        metadata={"num_waiting": str(num_waiting), "max_waiting": str(limit)},
        retry_after_s=max(1.0, wait_s or 1.0),
    )


def would_wait_too_long(request: Request, wait_s: float, limit_s: float) -> RequestFailure:
    """The early refusal of a request whose expected wait exceeds its tier's queue limit."""
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"the expected wait is {wait_s:.1f} s; tier {request.tier!r} allows {limit_s:.1f} s in the "
        f"queue; retry in {max(wait_s - limit_s, 0.5):.1f} s",
        metadata={"expected_wait_s": f"{wait_s:.3f}", "queue_limit_s": f"{limit_s:.3f}"},
        retry_after_s=max(wait_s - limit_s, 0.5),
    )


def waited_too_long(request: Request, now: float) -> RequestFailure:
    """The refusal of a request that reached its tier's queue limit before it was started."""
    waited = now - request.arrival_s
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"the request waited {waited:.1f} s, the queue limit of tier {request.tier!r}, and was not "
        "started; retry later",
        metadata={"waited_s": f"{waited:.3f}"},
        retry_after_s=max(1.0, waited / 2),
    )
