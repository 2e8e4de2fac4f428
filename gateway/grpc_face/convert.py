"""Messages of the public gRPC face to domain requests, and deltas to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millrace.common.v1 import chat_pb2, output_pb2
from millrace.inference.v1 import inference_pb2

from contract.chat import Prompt, TextPrompt, TokenPrompt
from contract.errors import MillraceError, Reason
from contract.outputs import TokenLogprobs
from contract.proto import chat
from contract.proto.grammar import verdict_message
from contract.proto.sampling import options
from contract.sampling import OPTIONS
from gateway.grpc_face.unknown import refuse_unknown
from gateway.pipeline.delta import ChoiceDelta, Usage
from gateway.pipeline.validate import check_conversation, check_metadata, refuse
from gateway.text.vocabulary import Vocabulary
from gateway.types.request import GenerationRequest

_FIELD_NAMES: Mapping[str, str] = {name: f"sampling.{name}" for name in (*OPTIONS, "stop")}
# Parts of names in the proto's own words.
_FIELD_PARTS: Mapping[str, str] = {
    ".function.name": ".name",
    ".function.parameters": ".parameters_json",
    ".function.arguments": ".arguments_json",
}
_CHAT_NAMES: Mapping[str, str] = {
    **_FIELD_NAMES,
    "messages": "conversation.messages",
    "tools": "conversation.tools",
    "tool_choice": "conversation.tool_choice",
    "template_name": "conversation.template_name",
    "template_options": "conversation.template_options",
    "documents": "conversation.documents",
    "continue_final_message": "conversation.continue_final_message",
    "prompt": "conversation.messages",
}


def chat_request(message: inference_pb2.ChatRequest) -> GenerationRequest:
    """The domain request of Chat."""
    _check(message)
    if message.sampling.HasField("prompt_logprobs"):
        field = "sampling.prompt_logprobs"
        raise MillraceError(
            Reason.UNSUPPORTED_FIELD, f"{field}: Chat does not report them; use Generate", field=field
        )
    return GenerationRequest(
        model=message.model,
        prompt=chat.conversation(message.conversation, "conversation."),
        sampling=options(message.sampling),
        response_format=chat.response_format(message.response_format),
        service_tier=message.service_tier,
        prompt_cache_key=message.prompt_cache_key,
        metadata=dict(message.metadata),
        face="grpc",
        field_names={**_CHAT_NAMES, **_format_name(message.response_format)},
        field_parts=_FIELD_PARTS,
    )


def generate_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """The domain request of Generate."""
    _check(message)
    prompt: Prompt = TextPrompt(message.text)
    if message.WhichOneof("prompt") == "token_ids":
        prompt = TokenPrompt(tuple(message.token_ids.ids))
    return GenerationRequest(
        model=message.model,
        prompt=prompt,
        sampling=options(message.sampling),
        response_format=chat.response_format(message.response_format),
        service_tier=message.service_tier,
        prompt_cache_key=message.prompt_cache_key,
        metadata=dict(message.metadata),
        echo=message.echo,
        face="grpc",
        field_names={**_FIELD_NAMES, **_format_name(message.response_format)},
    )


def _check(message: inference_pb2.ChatRequest | inference_pb2.GenerateRequest) -> None:
    refuse_unknown(message)
    check_metadata(message.metadata)


def _format_name(message: chat_pb2.ResponseFormat) -> Mapping[str, str]:
    kind = message.WhichOneof("format")
    return {"response_format": f"response_format.{kind}"} if kind else {}


def prompt_request(
    message: inference_pb2.CountTokensRequest | inference_pb2.TokenizeRequest,
) -> GenerationRequest:
    """A request with the prompt to encode; raises INVALID_ARGUMENT for none, and for no conversation."""
    refuse_unknown(message)
    match message.WhichOneof("input"):
        case "conversation":
            conversation = chat.conversation(message.conversation, "conversation.")
            request = GenerationRequest(
                model=message.model,
                prompt=conversation,
                field_names=_CHAT_NAMES,
                field_parts=_FIELD_PARTS,
            )
            check_conversation(request, conversation)
            return request
        case "text":
            names = {"prompt": "text"}
            return GenerationRequest(model=message.model, prompt=TextPrompt(message.text), field_names=names)
        case _:
            raise _refuse(message.model, "input", "give a conversation or a text")


def special_tokens(message: inference_pb2.TokenizeRequest) -> bool | None:
    """Whether to add them; raises INVALID_ARGUMENT where a template decides."""
    if not message.HasField("add_special_tokens"):
        return None
    if message.HasField("conversation"):
        raise _refuse(
            message.model, "add_special_tokens", "it has no effect with a conversation; leave it out"
        )
    return message.add_special_tokens


def ids_to_decode(message: inference_pb2.DetokenizeRequest, vocabulary: Vocabulary) -> list[int]:
    """The token ids; raises INVALID_ARGUMENT for one that the model does not have."""
    refuse_unknown(message)
    for index, token_id in enumerate(message.token_ids):
        if token_id >= vocabulary.size:
            raise _refuse(
                message.model,
                f"token_ids[{index}]",
                f"token id {token_id} is outside the vocabulary of {vocabulary.size} tokens",
            )
    return list(message.token_ids)


def _refuse(model: str, field: str, problem: str) -> MillraceError:
    return refuse(GenerationRequest(model=model, prompt=TextPrompt("")), field, problem)


def chat_choice(delta: ChoiceDelta, vocabulary: Vocabulary) -> inference_pb2.ChatChoice:
    """A delta of Chat."""
    return inference_pb2.ChatChoice(
        index=delta.index,
        content=delta.content,
        reasoning=delta.reasoning,
        tool_calls=[
            inference_pb2.ToolCallDelta(
                index=call.index, id=call.id, name=call.name, arguments_json=call.arguments
            )
            for call in delta.tool_calls
        ],
        logprobs=token_logprobs(delta.logprobs, vocabulary),
        finish_reason=_finish(delta),
        stop_reason=delta.stop_reason,
        verdict=None if delta.verdict is None else verdict_message(delta.verdict),
    )


def generate_choice(delta: ChoiceDelta, vocabulary: Vocabulary, echo: str) -> inference_pb2.GenerateChoice:
    """A delta of Generate, with the prompt's text in front where it is echoed."""
    return inference_pb2.GenerateChoice(
        index=delta.index,
        text=echo + delta.content,
        token_ids=delta.token_ids,
        logprobs=token_logprobs(delta.logprobs, vocabulary),
        finish_reason=_finish(delta),
        stop_reason=delta.stop_reason,
        prompt_logprobs=token_logprobs(delta.prompt_logprobs, vocabulary),
        verdict=None if delta.verdict is None else verdict_message(delta.verdict),
    )


def _finish(delta: ChoiceDelta) -> output_pb2.FinishReason.ValueType:
    return output_pb2.FinishReason.ValueType(delta.finish_reason or 0)


def token_logprobs(
    logprobs: Iterable[TokenLogprobs], vocabulary: Vocabulary
) -> list[output_pb2.TokenLogprob]:
    """Log-probabilities with the tokens' text and bytes."""
    return [
        output_pb2.TokenLogprob(
            token_id=each.token_id,
            logprob=each.logprob,
            text=vocabulary.token_text(each.token_id),
            token_bytes=vocabulary.token_bytes(each.token_id),
            top=[
                output_pb2.TokenLogprob(
                    token_id=token_id,
                    logprob=value,
                    text=vocabulary.token_text(token_id),
                    token_bytes=vocabulary.token_bytes(token_id),
                )
                for token_id, value in each.top
            ],
        )
        for each in logprobs
    ]


def usage_message(usage: Usage, *, timing: bool) -> output_pb2.Usage:
    """Usage, with the parts of the time to first token when asked for."""
    message = output_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_prompt_tokens=usage.cached_prompt_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )
    ttft = usage.ttft
    if timing and ttft is not None:
        message.ttft.CopyFrom(
            output_pb2.TimeToFirstToken(
                total_s=ttft.total_s,
                queue_s=ttft.queue_s,
                preprocess_s=ttft.preprocess_s,
                prefill_s=ttft.prefill_s,
                first_decode_s=ttft.first_decode_s,
                serialize_s=ttft.serialize_s,
                network_s=ttft.network_s,
            )
        )
    return message
