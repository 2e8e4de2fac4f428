"""Which requests are accepted at all, and the refusals of those that are not.

This is the only door: nothing is accepted before it, and nothing that passed it is dropped. What can never
fit is judged by the same memory plan that start-up allocated.
"""

from __future__ import annotations

import math
import sys

from contract.errors import context_length
from contract.retention import RECOMPUTE
from engine.config import SchedulerConfig
from engine.policy.forecast import Batch, Forecast, WaitForecast
from engine.policy.line import Line, account_of, slots_of
from engine.policy.rates import StepRate, Traffic
from engine.policy.shares import Shares
from engine.types import KeptBlocks, MemoryPlan, Request, RequestFailure

# Shortest and longest retry delay that a refusal names, in seconds.
_SHORTEST_RETRY_S = 0.5
_LONGEST_RETRY_S = 60.0
# Part of the time that is left which a forecast may fill, since forecasts err.
_MARGIN = 0.85
# The part for others as long as some are expected back; and for tenants that were accepted more than another
# that is refused: who has more clients is back more often.
_NEWCOMERS = 0.5
# The part that a retry delay aims at: between the two.
_AIM = 0.7
# The retry delay while nothing was measured: then no step has come back yet.
_RETRY_UNMEASURED_S = 1.0


def tokens_limit(request: Request, memory: MemoryPlan) -> int:
    """Longest prompt plus completion of the request: model, tier and max_tokens, in tokens."""
    asked = len(request.prompt_token_ids) + request.sampling.max_tokens
    return min(asked, _context(request, None if _outlives(request, memory) else memory.max_model_len))


def _context(request: Request, num_positions: int | None) -> int:
    limits = (num_positions, request.max_context_tokens)
    return min((each for each in limits if each is not None), default=sys.maxsize)


def kept_of(request: Request, memory: MemoryPlan) -> KeptBlocks | None:
    """The blocks that an answer looks at; None where it forgets nothing."""
    if request.retention is None:
        return None
    goes_on = tokens_limit(request, memory) > memory.max_model_len
    num_positions = memory.max_model_len if goes_on else 0
    return KeptBlocks.of(request.retention, len(request.prompt_token_ids), memory.block_size, num_positions)


def _outlives(request: Request, memory: MemoryPlan) -> bool:
    """Whether the answer may go on beyond the model's positions."""
    if request.retention is None or not request.retention.outlives_positions or request.sampling.beam_width:
        return False
    return KeptBlocks.can_renew(memory.max_model_len, memory.block_size)


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
    limit = _context(request, memory.max_model_len)
    if num_prompt < limit and _outlives(request, memory):
        # It is the prompt alone that must have room.
        limit = _context(request, None)
    # What is pooled has no tokens of an answer.
    least = 0 if request.pooling is not None else 1
    if num_known + least > limit:
        whose = "" if limit == memory.max_model_len else f" under the tier {request.tier!r}"
        return _too_long(num_known, least, limit, whose)
    # The last token is never fed back, so it needs no slot; and beyond the positions an answer begins anew.
    num_tokens = min(tokens_limit(request, memory), memory.max_model_len) - least
    num_blocks = _most_blocks(request, memory, num_tokens)
    width = max(1, request.sampling.beam_width)
    if num_blocks * width > memory.num_blocks or width > max_num_seqs:
        return _never_fits(request, memory, num_blocks * width)
    kept = kept_of(request, memory)
    num_measured = 0 if kept is None else kept.num_measured(num_tokens)
    if num_measured * memory.forgotten_block_bytes > memory.forgotten_bytes:
        return _never_measured(num_measured, memory)
    in_windows = width * min(num_blocks, memory.most_window_blocks)
    if in_windows > memory.num_window_blocks:
        return _never_fits_windows(request, memory, in_windows)
    return None


def _too_long(num_known: int, least: int, limit: int, whose: str) -> RequestFailure:
    problem = f"the prompt has {num_known} tokens{whose}"
    if least:
        problem += f", and at least {least} must be left for the answer"
    problem += f"; shorten the prompt by {num_known + least - limit} tokens"
    return RequestFailure(
        reason="CONTEXT_LENGTH_EXCEEDED",
        field="prompt",
        message=context_length(limit, problem),
        metadata={"prompt_tokens": str(num_known), "limit_tokens": str(limit)},
    )


def _most_blocks(request: Request, memory: MemoryPlan, num_tokens: int) -> int:
    """Blocks that one sequence of so many tokens may come to hold at a time."""
    kept = kept_of(request, memory)
    whole = -(-num_tokens // memory.block_size)
    if kept is None or request.sampling.beam_width:
        return whole
    return max(kept.most_blocks(num_tokens), whole if _may_remember(request) else 0)


def _may_remember(request: Request) -> bool:
    """Whether an answer that forgets is computed anew where that loses too much."""
    asked = request.retention
    return asked is not None and (asked.max_lost or 1) < 1 and asked.beyond == RECOMPUTE


def _never_fits(request: Request, memory: MemoryPlan, num_blocks: int) -> RequestFailure:
    if _may_remember(request):
        return _never_remembers(request, memory, num_blocks)
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


def _never_remembers(request: Request, memory: MemoryPlan, num_blocks: int) -> RequestFailure:
    return RequestFailure(
        reason="NEVER_FITS",
        field="kv.max_lost",
        message=f"kv.max_lost: an answer that may be computed anew with all of its keys and values needs "
        f"{num_blocks} KV blocks of {memory.block_size} tokens; the engine has {memory.num_blocks} in all; "
        "lower max_tokens, shorten the prompt, or leave max_lost out",
        metadata={"needed_blocks": str(num_blocks), "total_blocks": str(memory.num_blocks)},
    )


def _never_measured(num_blocks: int, memory: MemoryPlan) -> RequestFailure:
    needed = num_blocks * memory.forgotten_block_bytes
    return RequestFailure(
        reason="NEVER_FITS",
        field="kv.max_lost",
        message=f"kv.max_lost: to say what the answer loses, keys of {num_blocks} forgotten blocks take "
        f"{needed} bytes; the engine has {memory.forgotten_bytes} (engine.cache.forgotten_bytes); lower "
        "max_tokens, keep more, or leave max_lost out",
        metadata={"needed_bytes": str(needed), "forgotten_bytes": str(memory.forgotten_bytes)},
    )


def _never_fits_windows(request: Request, memory: MemoryPlan, num_blocks: int) -> RequestFailure:
    return RequestFailure(
        reason="NEVER_FITS",
        field="beam_width",
        message=f"{request.sampling.beam_width} beams need {num_blocks} blocks of layers with a window of "
        f"{memory.window} tokens; the engine has {memory.num_window_blocks} of them in all; lower beam_width",
        metadata={
            "needed_blocks": str(num_blocks),
            "total_blocks": str(memory.num_window_blocks),
            "block_size": str(memory.block_size),
        },
    )


class Door:
    """Accepts what can be kept. A request that is sent away for now has a ticket for its return."""

    def __init__(
        self, config: SchedulerConfig, line: Line, shares: Shares, rate: StepRate, traffic: Traffic
    ) -> None:
        self._config = config
        self._line = line
        self._forecast = WaitForecast(line, shares, rate, traffic)
        self.tickets = self._forecast.tickets

    def refusal(self, request: Request, num_tokens: int, batch: Batch, now: float) -> RequestFailure | None:
        """The refusal of a request with so many tokens to compute that has no room in the queue, would be
        late, or would go before one that was sent away and comes back; None when it is accepted.
        """
        forecast, account = self._forecast.of(request, num_tokens, batch, now), account_of(request)
        failure = self._without_space(request, forecast) or self._late(request, forecast, now)
        prompt, num_slots = forecast.prompt, slots_of(request)
        if failure is None:
            self.tickets.accept(account, prompt, num_slots, forecast.weighted_tokens, now)
        else:
            assert failure.retry_after_s is not None, "a refusal for now names a time"
            self.tickets.refuse(account, prompt, num_slots, now + failure.retry_after_s, now)
        return failure

    def _late(self, request: Request, forecast: Forecast, now: float) -> RequestFailure | None:
        """When to come back: when the excess is worked off, and those of its tenant that were refused before
        it have had their turn.
        """
        if not self._config.refuse_early or request.queue_deadline_s is None:
            return None
        limit_s = request.queue_deadline_s - request.arrival_s
        # A prompt that takes longer than that by itself is judged by its wait alone.
        prompt_s = forecast.prompt_s if forecast.prompt_s < limit_s else 0.0
        # With nobody ahead the margin is left out, because the request would gain nothing by coming later.
        left_s = request.queue_deadline_s - now
        margin = _NEWCOMERS if forecast.makes_way else _MARGIN
        if not forecast.wait_s or forecast.wait_s + prompt_s <= margin * left_s:
            return None
        expected_s = forecast.usual_wait_s + prompt_s
        if expected_s == math.inf:
            expectation = (
                f"{len(self._line)} requests wait, and how fast this engine is has yet to be measured"
            )
        elif expected_s > _MARGIN * left_s:
            waited_s = now - request.arrival_s
            expectation = f"the first token is expected {waited_s + expected_s:.1f} s after the request came"
        elif forecast.wait_s + prompt_s > _MARGIN * left_s:
            expectation = "higher tiers may take the batch slots that come free"
        else:
            expectation = "requests that were sent away until about now go first"
        return _refusal(
            f"{expectation}; tier {request.tier!r} allows {limit_s:.1f} s",
            forecast.shown_wait_s + prompt_s - _AIM * limit_s + forecast.line_s,
            {"expected_s": f"{expected_s:.3f}", "limit_s": f"{limit_s:.3f}"},
        )

    def _without_space(self, request: Request, forecast: Forecast) -> RequestFailure | None:
        """A queue's part of a memory that several share, as large as what is left free: so there is always
        room for who has none, and nobody has to be pushed out (Choudhury and Hahne, "Dynamic queue length
        thresholds for shared-memory packet switches", 1998).
        """
        own = self._line.parts_of(request.priority).get(request.tenant)
        num_waiting, most = len(self._line), self._config.max_waiting
        num_own, space = own.num_sequences if own else 0, most - num_waiting
        if num_own < space:
            return None
        return _refusal(
            f"{num_own} requests of this tenant wait for this engine, which has space for {space} more",
            forecast.usual_wait_s + forecast.line_s,
            {"num_waiting": str(num_waiting), "max_waiting": str(most)},
        )


def _refusal(message: str, delay_s: float, metadata: dict[str, str]) -> RequestFailure:
    if delay_s == math.inf:
        delay_s = _RETRY_UNMEASURED_S
    # In whole tenths, so that the message says exactly what the header does.
    retry_s = math.ceil(10 * min(max(_SHORTEST_RETRY_S, delay_s), _LONGEST_RETRY_S)) / 10
    return RequestFailure(
        reason="QUEUE_LIMIT_EXCEEDED",
        message=f"{message}; try again in {retry_s:.1f} s",
        metadata=metadata,
        retry_after_s=retry_s,
    )
