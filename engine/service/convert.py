"""Between the wire and the engine's types. The only module here, besides the servicer, that sees protos."""

from __future__ import annotations

import math
from collections.abc import Collection
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec
from millrace.common.v1 import context_pb2, error_pb2, grammar_pb2, output_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2

from engine.types import (
    BlocksStored,
    ChoiceStatistics,
    FirstTokenTimings,
    GrammarSpec,
    KvEvent,
    MemoryPlan,
    ModelFacts,
    Request,
    RequestFailure,
    SamplingParams,
    SchedulerLoad,
    TokenEvent,
    TokenLogprobs,
)
from services.errors import MillraceError, Reason

# A message's fields by their names. Messages inside messages are given so: protobuf copies a message into
# another by writing and reading it.
Fields: TypeAlias = dict[str, Any]

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_BEAMS = 16


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What submissions are checked against."""

    facts: ModelFacts
    # Longest prompt plus completion that fits into the KV cache as well.
    max_tokens_total: int
    simulated: bool


def to_request(
    submit: engine_pb2.Submit,
    context: context_pb2.RequestContext,
    limits: ModelLimits,
    *,
    request_id: int,
    now_s: float,
    now_unix_ms: int,
) -> Request:
    """The request of a submission whose context is verified; raises MillraceError naming the field."""
    prompt = tuple(submit.prompt_token_ids)
    output = tuple(submit.output_token_ids)
    _check_ids("prompt_token_ids", prompt, limits.facts.vocab_size)
    _check_ids("output_token_ids", output, limits.facts.vocab_size)
    if submit.adapter:
        raise _unsupported("adapter", "this engine serves the base model only; leave the adapter empty")
    if submit.HasField("grammar") and limits.simulated:
        raise _unsupported("grammar", "the simulated engine has no grammar; use a real model")
    sampling = to_sampling(submit.sampling, limits, num_prompt_tokens=len(prompt))
    if output and (sampling.best_of > 1 or sampling.beam_width):
        raise _invalid("output_token_ids", "continues one choice; resubmit each choice with n = 1")
    if sampling.beam_width and submit.HasField("grammar"):
        # A grammar ends a choice whatever ignore_eos says, and a beam knows its end by the stop token.
        stop_ids = dict.fromkeys((*sampling.stop_token_ids, *limits.facts.eos_token_ids))
        sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(stop_ids))
    return Request(
        request_id=request_id,
        external_id=context.request_id,
        client_request_id=context.client_request_id,
        prompt_token_ids=prompt,
        sampling=sampling,
        output_token_ids=output,
        choice_index=submit.choice_index,
        grammar=_grammar(submit.grammar) if submit.HasField("grammar") else None,
        tenant=context.tenant,
        tier=context.tier,
        priority=context.priority,
        weight=context.weight if context.HasField("weight") and context.weight > 0 else 1.0,
        cache_salt=context.cache_salt,
        arrival_s=now_s,
        ttft_deadline_s=(
            now_s + context.ttft_target_ms / 1000 if context.HasField("ttft_target_ms") else None
        ),
        queue_deadline_s=(
            now_s + context.queue_limit_ms / 1000 if context.HasField("queue_limit_ms") else None
        ),
        deadline_s=(
            now_s + (context.deadline_unix_ms - now_unix_ms) / 1000
            if context.HasField("deadline_unix_ms")
            else None
        ),
        max_context_tokens=context.max_context_tokens if context.HasField("max_context_tokens") else None,
        traceparent=context.traceparent,
        tracestate=context.tracestate,
    )


def _grammar(artifact: grammar_pb2.GrammarArtifact) -> GrammarSpec:
    return GrammarSpec(digest=artifact.digest, payload=artifact.payload, backend=artifact.backend)


def to_sampling(
    options: sampling_pb2.SamplingOptions, limits: ModelLimits, *, num_prompt_tokens: int
) -> SamplingParams:
    """Complete sampling parameters; unset options are neutral. Raises MillraceError naming the option."""
    has = options.HasField
    if not has("seed"):
        raise _invalid("sampling.seed", "must be set, so that another engine can continue the same tokens")
    stop_ids = tuple(dict.fromkeys(options.stop_token_ids))
    if not options.ignore_eos:
        stop_ids = tuple(dict.fromkeys((*stop_ids, *limits.facts.eos_token_ids)))
    room = max(1, limits.max_tokens_total - num_prompt_tokens)
    n = options.n if has("n") else 1
    # Of those that are not asked about, protobuf's own default is the neutral value.
    sampling = SamplingParams(
        temperature=options.temperature if has("temperature") else 1.0,
        top_k=options.top_k,
        top_p=options.top_p if has("top_p") else 1.0,
        min_p=options.min_p,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty if has("repetition_penalty") else 1.0,
        logit_bias=dict(options.logit_bias),
        allowed_token_ids=tuple(options.allowed_token_ids),
        seed=options.seed,
        max_tokens=options.max_tokens if has("max_tokens") else room,
        min_tokens=options.min_tokens,
        stop_token_ids=stop_ids,
        ignore_eos=options.ignore_eos,
        n=n,
        best_of=options.best_of if has("best_of") else n,
        logprobs=options.logprobs if has("logprobs") else None,
        prompt_logprobs=options.prompt_logprobs if has("prompt_logprobs") else None,
        beam_width=options.beam_width,
    )
    _check_sampling(sampling, limits.facts.vocab_size)
    return sampling


# Option, smallest and largest allowed value.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.0, 100.0),
    ("max_tokens", 1, math.inf),
    ("n", 1, MAX_CHOICES),
    ("best_of", 1, MAX_CHOICES),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("beam_width", 0, MAX_BEAMS),
)


_numbers = attrgetter(*(name for name, _, _ in _RANGES))


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    for value, (name, low, high) in zip(_numbers(sampling), _RANGES, strict=True):
        if value is not None and not low <= value <= high:
            raise _invalid(f"sampling.{name}", f"is {value:g}; it must be from {low:g} to {high:g}")
    if not (sampling.top_p and sampling.repetition_penalty):
        name = "repetition_penalty" if sampling.top_p else "top_p"
        raise _invalid(f"sampling.{name}", "is 0; it must be above 0")
    if sampling.min_tokens > sampling.max_tokens:
        raise _invalid(
            "sampling.min_tokens", f"is {sampling.min_tokens}, above max_tokens = {sampling.max_tokens}"
        )
    if sampling.best_of < sampling.n:
        raise _invalid("sampling.best_of", f"is {sampling.best_of}, below n = {sampling.n}")
    if sampling.beam_width and not sampling.n <= sampling.beam_width:
        raise _invalid("sampling.beam_width", f"is {sampling.beam_width}, below n = {sampling.n}")
    if sampling.beam_width and sampling.best_of != sampling.n:
        raise _invalid("sampling.best_of", "cannot be combined with beam_width; leave one of them out")
    _check_ids("sampling.allowed_token_ids", sampling.allowed_token_ids, vocab_size)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for token_id, bias in sampling.logit_bias.items():
        if not math.isfinite(bias):
            raise _invalid("sampling.logit_bias", f"of token {token_id} is {bias}; it must be finite")


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    worst = max(token_ids, default=0) if token_ids else 0
    if worst >= vocab_size:
        raise _invalid(field, f"holds token id {worst}; the vocabulary has {vocab_size} tokens")


def _invalid(field: str, problem: str) -> MillraceError:
    return MillraceError(Reason.INVALID_ARGUMENT, f"{field} {problem}", field=field)


def _unsupported(field: str, remedy: str) -> MillraceError:
    return MillraceError(Reason.UNSUPPORTED_FIELD, f"{field} is not supported: {remedy}", field=field)


# Towards the gateway.


def to_info(
    *,
    engine_id: str,
    model: str,
    fingerprint: str,
    memory: MemoryPlan,
    facts: ModelFacts,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    pool: str,
) -> engine_pb2.EngineInfo:
    """What this engine is."""
    return engine_pb2.EngineInfo(
        engine_id=engine_id,
        model=model,
        vocabulary_fingerprint=fingerprint,
        max_model_len=memory.max_model_len,
        block_size=memory.block_size,
        num_blocks=memory.num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        pool=pool,
        dtype=facts.dtype,
        attention_backend=facts.attention_backend,
        device=facts.device,
        memory=engine_pb2.MemoryPlan(
            total_bytes=memory.total_bytes,
            weights_bytes=memory.weights_bytes,
            kv_cache_bytes=memory.kv_cache_bytes,
            workspace_bytes=memory.workspace_bytes,
            headroom_bytes=memory.headroom_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
        ),
    )


def to_load(load: SchedulerLoad, *, draining: bool) -> Fields:
    """The EngineLoad that rides on every message."""
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "pending_prefill_tokens": load.pending_prefill_tokens,
        "num_free_blocks": load.num_free_blocks,
        "num_total_blocks": load.num_total_blocks,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_tokens_per_s": load.decode_tokens_per_s,
        "oldest_wait_s": load.oldest_wait_s,
        "draining": draining,
    }


def to_output(event: TokenEvent, handle: int) -> Fields:
    """The RequestOutput with one choice's news of one step."""
    output: Fields = {"handle": handle, "choice_index": event.choice_index, "token_ids": event.token_ids}
    if event.logprobs:
        output["logprobs"] = [_logprob(each) for each in event.logprobs]
    if event.prompt_logprobs:
        output["prompt_logprobs"] = [_logprob(each) for each in event.prompt_logprobs]
    if event.finish_reason is not None:
        output["finish_reason"] = int(event.finish_reason)
    if event.stop_token_id is not None:
        output["stop_token_id"] = event.stop_token_id
    if event.failure is not None:
        output["error"] = to_error_detail(event.failure)
    if event.first_token is not None:
        output["first_token"] = _first_token(event.first_token)
    if event.statistics is not None:
        output["statistics"] = _statistics(event.statistics)
    return output


def to_failure(error: MillraceError) -> RequestFailure:
    """A raised error as plain data."""
    return RequestFailure(
        reason=error.reason.value,
        message=error.message,
        field=error.field,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def to_error_detail(failure: RequestFailure) -> error_pb2.ErrorDetail:
    """A failure inside a stream."""
    return error_pb2.ErrorDetail(
        reason=failure.reason,
        message=failure.message,
        field=failure.field,
        metadata=failure.metadata,
        retry_after_s=failure.retry_after_s,
    )


def to_kv_event(event: KvEvent) -> engine_pb2.KvEvent:
    """A change of the prefix cache."""
    if isinstance(event, BlocksStored):
        return engine_pb2.KvEvent(
            stored=engine_pb2.BlocksStored(block_hashes=event.block_hashes, parent_hash=event.parent_hash)
        )
    return engine_pb2.KvEvent(evicted=engine_pb2.BlocksEvicted(block_hashes=event.block_hashes))


def _logprob(logprob: TokenLogprobs) -> output_pb2.TokenLogprob:
    top = [
        output_pb2.TokenLogprob(token_id=token_id, logprob=value)
        for token_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
    ]
    return output_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob, top=top)


def _first_token(timings: FirstTokenTimings) -> Fields:
    return {
        "queue_s": timings.first_scheduled_s - timings.arrival_s,
        "prefill_s": timings.prefill_end_s - timings.first_scheduled_s,
        "first_decode_s": timings.first_token_s - timings.prefill_end_s,
        "cached_prompt_tokens": timings.cached_prompt_tokens,
        "num_prefill_chunks": len(timings.prefill_chunks),
    }


def _statistics(statistics: ChoiceStatistics) -> Fields:
    return {
        "num_steps": statistics.num_steps,
        "num_preemptions": statistics.num_preemptions,
        "recomputed_tokens": statistics.recomputed_tokens,
        "drafted_tokens": statistics.drafted_tokens,
        "accepted_tokens": statistics.accepted_tokens,
        "decode_s": statistics.decode_s,
        "grammar_s": statistics.grammar_s,
        "delayed_by_s": statistics.delayed_by_s,
    }
