"""Engine messages to domain types and back. The only place here that knows the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.common.v1 import output_pb2
from millrace.engine.v1 import engine_pb2

from gateway.engines.types import (
    CancelReason,
    ChoiceStatistics,
    EngineInfo,
    EngineLoad,
    EngineOutput,
    FinishReason,
    FirstToken,
    KvEvent,
    Sampling,
    Submission,
    TokenLogprob,
)
from services.status import from_detail

_FINISH = {int(reason): reason for reason in FinishReason}


def hello(gateway: str, fingerprint: str) -> engine_pb2.AttachRequest:
    """First message of a stream."""
    return engine_pb2.AttachRequest(
        hello=engine_pb2.Hello(gateway=gateway, vocabulary_fingerprint=fingerprint)
    )


def submit(handle: int, submission: Submission) -> engine_pb2.AttachRequest:
    """Submission under a handle of this stream."""
    grammar, context = submission.grammar, submission.context
    # Messages inside messages as their fields: protobuf copies a message by writing and reading it.
    fields: Any = {
        "handle": handle,
        "context": {"payload": context.payload, "signature": context.signature},
        "prompt_token_ids": submission.prompt_token_ids,
        "output_token_ids": submission.output_token_ids,
        "sampling": _sampling(submission.sampling),
        "grammar": None
        if grammar is None
        else {"digest": grammar.digest, "payload": grammar.payload, "backend": grammar.backend},
        "choice_index": submission.choice_index,
        "adapter": submission.adapter,
    }
    return engine_pb2.AttachRequest(submit=fields)


def cancel(handle: int, reason: CancelReason) -> engine_pb2.AttachRequest:
    """Cancellation of a handle."""
    return engine_pb2.AttachRequest(
        cancel=engine_pb2.Cancel(handle=handle, reason=engine_pb2.CancelReason.ValueType(reason.value))
    )


def several(messages: Iterable[engine_pb2.AttachRequest]) -> engine_pb2.AttachRequest:
    """Submissions and cancellations in one message."""
    return engine_pb2.AttachRequest(several=engine_pb2.Several(requests=messages))


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """Every option is set, so that no default of the engine's matters."""
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop_token_ids": sampling.stop_token_ids,
        "ignore_eos": sampling.ignore_eos,
        "n": sampling.n,
        "best_of": None if sampling.best_of == sampling.n else sampling.best_of,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs,
        "beam_width": sampling.beam_width or None,
    }


def output(message: engine_pb2.RequestOutput) -> EngineOutput:
    """One request's part of a step."""
    result = EngineOutput(message.choice_index, list(message.token_ids))
    if message.logprobs:
        result.logprobs = logprobs(message.logprobs)
    if message.HasField("first_token"):
        first = message.first_token
        result.first_token = FirstToken(
            first.queue_s,
            first.prefill_s,
            first.first_decode_s,
            first.cached_prompt_tokens,
            first.num_prefill_chunks,
        )
        result.prompt_logprobs = logprobs(message.prompt_logprobs)
    if message.finish_reason:
        result.finish_reason = _FINISH[message.finish_reason]
        if message.HasField("error"):
            result.error = from_detail(message.error)
        if message.HasField("stop_token_id"):
            result.stop_token_id = message.stop_token_id
        if message.HasField("statistics"):
            result.statistics = _statistics(message.statistics)
    return result


def logprobs(messages: Iterable[output_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    """Log-probabilities with their alternatives."""
    return tuple(
        TokenLogprob(each.token_id, each.logprob, tuple((top.token_id, top.logprob) for top in each.top))
        for each in messages
    )


def _statistics(message: engine_pb2.ChoiceStatistics) -> ChoiceStatistics:
    return ChoiceStatistics(
        message.num_steps,
        message.num_preemptions,
        message.recomputed_tokens,
        message.drafted_tokens,
        message.accepted_tokens,
        message.decode_s,
        message.grammar_s,
        dict(message.delayed_by_s),
    )


def info(message: engine_pb2.EngineInfo) -> EngineInfo:
    """What Welcome says."""
    return EngineInfo(
        message.engine_id,
        message.model,
        message.vocabulary_fingerprint,
        message.max_model_len,
        message.block_size,
        message.num_blocks,
        message.max_num_seqs,
        message.max_num_batched_tokens,
        tuple(message.adapters),
        message.pool,
    )


def load(message: engine_pb2.EngineLoad) -> EngineLoad:
    """An engine's load report."""
    return EngineLoad(
        message.num_running,
        message.num_waiting,
        message.pending_prefill_tokens,
        message.num_free_blocks,
        message.num_total_blocks,
        message.prefill_tokens_per_s,
        message.decode_tokens_per_s,
        message.oldest_wait_s,
        message.draining,
    )


def kv_event(message: engine_pb2.KvEvent) -> KvEvent:
    """A change of an engine's prefix cache."""
    if message.HasField("stored"):
        return KvEvent(tuple(message.stored.block_hashes), True, message.stored.parent_hash)
    return KvEvent(tuple(message.evicted.block_hashes), False)
