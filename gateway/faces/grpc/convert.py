"""Messages of the public gRPC face to domain requests, and deltas to messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from millrace.common.v1 import chat_pb2, output_pb2
from millrace.inference.v1 import inference_pb2
from msgspec.structs import asdict

from contract.chat import Conversation, LeftOut, Prompt, TextPrompt, TokenPrompt
from contract.errors import invalid, unsupported
from contract.outputs import TokenLogprobs
from contract.proto import chat
from contract.proto.engine import retention, sampling_options
from contract.proto.grammar import verdict_message
from contract.sampling import OPTIONS
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.pipeline.delta import ChoiceDelta, Usage
from gateway.pipeline.validate import (
    SizedConversation,
    check_conversation,
    check_counts,
    check_metadata,
)
from gateway.text.detokenizer import Vocabulary
from gateway.types.request import GenerationRequest

_FIELD_NAMES: Mapping[str, str] = {name: f"sampling.{name}" for name in (*OPTIONS, "stop")}
_Request: TypeAlias = inference_pb2.ChatRequest | inference_pb2.GenerateRequest
# Parts of names in the proto's own words.
_FIELD_PARTS: Mapping[str, str] = {
    ".function.name": ".name",
    ".function.parameters": ".parameters_json",
    ".function.arguments": ".arguments_json",
}
_CHAT_NAMES: Mapping[str, str] = {
    **_FIELD_NAMES,
    **{name: f"conversation.{name}" for name in Conversation.__struct_fields__},
    "prompt": "conversation.messages",
}


def chat_request(
    message: inference_pb2.ChatRequest, limits: RequestConfig = DEFAULT_REQUEST_LIMITS
) -> GenerationRequest:
    """The domain request of Chat, within the limits."""
    check_metadata(message.metadata)
    if message.sampling.HasField("prompt_logprobs"):
        field = "sampling.prompt_logprobs"
        raise unsupported(field, "use Generate", "Chat does not report them")
    return _request(message, _conversation(message.conversation, limits), _CHAT_NAMES)


def _conversation(message: chat_pb2.Conversation, limits: RequestConfig) -> Conversation:
    sized = SizedConversation(
        num_messages=len(message.messages),
        num_tool_calls=sum(len(each.tool_calls) for each in message.messages),
        num_tools=len(message.tools),
    )
    check_counts(sized, limits, "conversation.{}".format)
    return chat.conversation(message, "conversation.")


def generate_request(message: inference_pb2.GenerateRequest) -> GenerationRequest:
    """The domain request of Generate."""
    check_metadata(message.metadata)
    if message.WhichOneof("prompt") == "token_ids":
        _refuse_special_tokens(message, "token ids, which are taken as they are")
        prompt: Prompt = TokenPrompt(tuple(message.token_ids.ids))
    else:
        prompt = _text(message)
    return _request(message, prompt, _FIELD_NAMES, echo=message.echo)


def _request(
    message: _Request, prompt: Prompt, names: Mapping[str, str], *, echo: bool = False
) -> GenerationRequest:
    kind = message.response_format.WhichOneof("format")
    return GenerationRequest(
        model=message.model,
        prompt=prompt,
        sampling=sampling_options(message.sampling),
        response_format=chat.response_format(message.response_format),
        service_tier=message.service_tier,
        prompt_cache_key=message.prompt_cache_key,
        cache_salt=message.cache_salt if message.HasField("cache_salt") else None,
        truncate_prompt_tokens=_cut_to(message),
        retention=retention(message.kv) if message.HasField("kv") else None,
        metadata=dict(message.metadata),
        allow_fallback=not message.refuse_fallback,
        echo=echo,
        face="grpc",
        field_names={**names, "response_format": f"response_format.{kind}"} if kind else names,
        field_parts=_FIELD_PARTS,
    )


def prompt_request(
    message: inference_pb2.CountTokensRequest | inference_pb2.TokenizeRequest, limits: RequestConfig
) -> GenerationRequest:
    """A request with the prompt to encode; raises INVALID_ARGUMENT for none, and for no conversation."""
    cut_to = _cut_to(message) if isinstance(message, inference_pb2.TokenizeRequest) else None
    match message.WhichOneof("input"):
        case "conversation":
            _refuse_special_tokens(message, "a conversation")
            conversation = _conversation(message.conversation, limits)
            request = GenerationRequest(
                model=message.model,
                prompt=conversation,
                truncate_prompt_tokens=cut_to,
                field_names=_CHAT_NAMES,
                field_parts=_FIELD_PARTS,
            )
            check_conversation(request, conversation)
            return request
        case "text":
            return GenerationRequest(
                model=message.model,
                prompt=_text(message),
                truncate_prompt_tokens=cut_to,
                field_names={"prompt": "text"},
            )
        case _:
            raise invalid("input", "give a conversation or a text")


def _cut_to(message: _Request | inference_pb2.TokenizeRequest) -> int | None:
    return message.truncate_prompt_tokens if message.HasField("truncate_prompt_tokens") else None


def _text(
    message: inference_pb2.GenerateRequest | inference_pb2.CountTokensRequest | inference_pb2.TokenizeRequest,
) -> TextPrompt:
    """A plain text, and whether the tokenizer puts its tokens around it."""
    adds = message.add_special_tokens or not message.HasField("add_special_tokens")
    return TextPrompt(message.text, add_special_tokens=adds)


def _refuse_special_tokens(message: Any, prompt: str) -> None:
    if message.HasField("add_special_tokens"):
        raise invalid("add_special_tokens", f"it has no effect with {prompt}; leave it out")


def left_out(found: LeftOut | None) -> inference_pb2.LeftOut | None:
    """What the model has not seen of a prompt."""
    return None if found is None else inference_pb2.LeftOut(**asdict(found))


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

    def token(token_id: int, logprob: float, top: Iterable[tuple[int, float]]) -> output_pb2.TokenLogprob:
        return output_pb2.TokenLogprob(
            token_id=token_id,
            logprob=logprob,
            text=vocabulary.token_text(token_id),
            token_bytes=vocabulary.token_bytes(token_id),
            top=[token(*each, ()) for each in top],
        )

    return [token(each.token_id, each.logprob, each.top) for each in logprobs]


def usage_message(usage: Usage, *, timing: bool) -> output_pb2.Usage:
    """Usage, with the parts of the time to first token when asked for."""
    ttft = asdict(usage.ttft) if timing and usage.ttft is not None else None
    # Not said over gRPC, where nothing is asked for by test_time: here and below.
    if ttft is not None:
        del ttft["deliberation_s"]
    # The API's completion_tokens are all that were generated, as OpenAI counts.
    numbers = asdict(usage) | {"completion_tokens": usage.billed_tokens, "ttft": ttft}
    del numbers["delayed_by_s"], numbers["shared_with"], numbers["deliberated"]
    return output_pb2.Usage(**numbers)
