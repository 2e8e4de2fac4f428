"""Engine messages to domain types and back. The only place here that knows the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from millrace.engine.v1 import engine_pb2

from contract.engines import CancelReason
from contract.outputs import FinishReason
from contract.proto import sampling
from contract.proto.engine import first_token, logprobs, statistics
from contract.proto.grammar import grammar_fields
from contract.proto.status import from_detail
from gateway.engines.types import EngineOutput, Submission

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
        "sampling": sampling.fields(submission.sampling),
        "grammar": None if grammar is None else grammar_fields(grammar),
        "choice_index": submission.choice_index,
        "adapter": submission.adapter,
        "entry_id": submission.entry_id,
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


def output(message: engine_pb2.RequestOutput) -> EngineOutput:
    """One request's part of a step."""
    result = EngineOutput(message.choice_index, list(message.token_ids))
    if message.withheld_tokens:
        result.withheld_tokens = message.withheld_tokens
        return result
    if message.logprobs:
        result.logprobs = logprobs(message.logprobs)
    if message.HasField("first_token"):
        result.first_token = first_token(message.first_token)
        result.prompt_logprobs = logprobs(message.prompt_logprobs)
    if message.finish_reason:
        result.finish_reason = _FINISH[message.finish_reason]
        if message.HasField("error"):
            result.error = from_detail(message.error)
        if message.HasField("stop_token_id"):
            result.stop_token_id = message.stop_token_id
        if message.HasField("statistics"):
            result.statistics = statistics(message.statistics)
    return result
