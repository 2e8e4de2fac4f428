"""Calls to the tokenizer service. Prompts go over one stream; the vocabulary is fetched once."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import grpc
import msgspec
from millrace.common.v1 import chat_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from contract.chat import Conversation, LeftOut, Prompt, PromptList, ResponseFormat, TextPrompt, TokenPrompt
from contract.errors import MillraceError, Reason
from contract.grammar import Verdict
from contract.pooling import PooledModel
from contract.proto.chat import conversation_fields, format_fields
from contract.proto.grammar import grammar, report, verdict
from contract.proto.status import from_rpc_error
from contract.vocabulary import DecoderKind
from gateway.text.detokenizer import Vocabulary
from gateway.tokenizer.stream import PrepareStreams, Unanswered
from gateway.types.request import Encoded, Prepared, PreparedText
from runtime.channels import connect

# Answers of the tokenizer service to domain types.

_DECODERS = {tokenizer_pb2.DecoderKind.Value(f"DECODER_KIND_{kind.name}"): kind for kind in DecoderKind} | {
    tokenizer_pb2.DECODER_KIND_UNSPECIFIED: DecoderKind.BYTE_LEVEL
}


def prepared(message: tokenizer_pb2.PrepareResponse) -> Prepared:
    """What the tokenizer service made of a request."""
    return Prepared(
        token_ids=tuple(message.token_ids),
        grammar=grammar(message.grammar) if message.HasField("grammar") else None,
        enforcement=report(message.enforcement) if message.HasField("enforcement") else None,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        assistant_prefix=message.assistant_prefix,
        texts=tuple(
            PreparedText(
                num_tokens=each.num_tokens,
                num_left_out=each.num_truncated_tokens,
                second_start=each.second_start,
            )
            for each in message.texts
        ),
        left_out=_left_out(message),
    )


def _left_out(message: tokenizer_pb2.PrepareResponse | tokenizer_pb2.TokenizeResponse) -> LeftOut | None:
    if not message.num_truncated_tokens and not message.num_turns:
        return None
    return LeftOut(
        num_tokens=message.num_truncated_tokens,
        num_turns=message.num_truncated_turns,
        of_turns=message.num_turns,
    )


def vocabulary(message: tokenizer_pb2.GetVocabularyResponse) -> Vocabulary:
    """What decoding needs."""
    config: dict[str, Any] = {}
    if message.generation_config_json:
        config = msgspec.json.decode(message.generation_config_json, type=dict[str, Any])
    return Vocabulary(
        fingerprint=message.fingerprint,
        decoder=_DECODERS[message.decoder],
        tokens=tuple(message.tokens),
        special_ids=frozenset(message.special_ids),
        byte_ids=frozenset(message.byte_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        tool_call_format=message.tool_call_format,
        reasoning_format=message.reasoning_format,
        generation_config=config,
        sampling_sources=dict(message.sampling_sources),
        pooled=_pooled(message.pooled) if message.HasField("pooled") else None,
        takes_effort=message.takes_effort,
    )


def _pooled(message: tokenizer_pb2.PooledModel) -> PooledModel:
    tasks: tuple[Any, ...] = tuple(message.tasks)
    return PooledModel(
        tasks=tasks,
        num_dimensions=message.num_dimensions,
        has_fewer_dimensions=message.has_fewer_dimensions,
        dimensions=tuple(message.dimensions),
        max_tokens=message.max_tokens,
        truncates=message.truncates,
        prompts=dict(message.prompts),
        default_prompt=message.default_prompt,
        labels=tuple(message.labels),
    )


_log = logging.getLogger(__name__)

_RETRY_S = 0.2
# Sendings of one request to a service that is lost before its answer.
_MAX_SENT = 3
# How long a request waits for a service that is gone to come back: as long as for an engine, by default.
COMEBACK_S = 5.0
# Preparing is milliseconds; compiling a hard grammar has its own, lower, limit in the service.
PREPARE_TIMEOUT_S = 30.0
# Texts beyond it take a millisecond or more each time that they are copied.
_LARGE_CHARACTERS = 1024 * 1024


class Pauses(Protocol):
    """Between the parts of a long piece of work."""

    async def rest(self) -> None:
        """Lets others go on."""
        ...


class TokenizerClient:
    """The tokenizer service of this deployment, serving one model."""

    def __init__(
        self,
        target: str,
        *,
        comeback_s: float = COMEBACK_S,
        silence_limit_s: float = math.inf,
        pauses: Callable[[], Pauses] | None = None,
    ) -> None:
        """`pauses` gives what lets others go on while a large prompt is put into a message."""
        self.target = target
        self._comeback_s = comeback_s
        self._channel = connect(target)
        self._stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)
        self._pauses = pauses
        self._prepare = PrepareStreams(target, silence_limit_s=silence_limit_s)

    async def close(self) -> None:
        """Closes the connection."""
        await self._prepare.close()
        await self._channel.close(None)

    async def wait_for_vocabulary(
        self, model: str, failed: Callable[[str], None] = lambda why: None
    ) -> Vocabulary:
        """The vocabulary, as soon as the service answers; tries until it does. `failed` gets why not."""
        failure = ""
        while True:
            try:
                request = tokenizer_pb2.GetVocabularyRequest(model=model)
                return vocabulary(await self._stub.GetVocabulary(request, timeout=PREPARE_TIMEOUT_S))
            except grpc.RpcError as error:
                message = from_rpc_error(error, unavailable=Reason.TOKENIZER_UNAVAILABLE).message
                if message != failure:
                    _log.warning("tokenizer service at %s has no %s yet: %s", self.target, model, message)
                    failed(message)
                failure = message
            await asyncio.sleep(_RETRY_S * random.uniform(0.5, 1.0))

    async def prepare(
        self,
        *,
        model: str,
        prompt: Prompt,
        response_format: ResponseFormat | None,
        context: Any,
        tenant: str = "",
        traceparent: tuple[str, str] = ("", ""),
        timeout_s: float = PREPARE_TIMEOUT_S,
        max_prompt_tokens: int = 0,
        truncates: bool = False,
        keeps_start: bool = False,
    ) -> Prepared:
        """Renders, encodes and compiles, below the span (traceparent, tracestate), in the tenant's queue. A
        prompt of more than `max_prompt_tokens` is refused, or loses what is oldest where it `truncates`, or
        what comes last with `keeps_start`.

        Raises what the service refused, or TOKENIZER_UNAVAILABLE.
        """
        parts: dict[str, Any] = {
            "model": model,
            "context": context,
            # The service refuses what cannot fit before it spends time on encoding it.
            "max_prompt_tokens": max_prompt_tokens or None,
            "truncation": tokenizer_pb2.TRUNCATION_KEEP_START
            if truncates and keeps_start
            else _truncation(truncates),
            "response_format": None if response_format is None else format_fields(response_format),
        }
        match prompt:
            case Conversation():
                parts["conversation"] = conversation_fields(prompt)
            case TextPrompt(text=text, add_special_tokens=adds):
                parts["text"], parts["add_special_tokens"] = text, None if adds else False
            case TokenPrompt(token_ids=ids):
                parts["encoded"] = tokenizer_pb2.EncodedPrompt(ids=ids)
            case PromptList(prompts=prompts):
                parts["texts"] = {"texts": [_text_input(each) for each in prompts]}
        wire = await self._wire(parts, prompt)
        del parts
        try:
            answer = await self._answer(
                wire,
                traceparent,
                min(timeout_s, PREPARE_TIMEOUT_S),
                tenant=tenant,
                field="messages" if isinstance(prompt, Conversation) else "prompt",
            )
        except MillraceError as error:
            raise _unreachable(error) from error
        return prepared(answer)

    async def prepare_texts(
        self, *, prompt: PromptList, timeout_s: float = PREPARE_TIMEOUT_S, **options: Any
    ) -> Prepared:
        """The same for a list of texts: in one call, unless they are megabytes. An error names its text."""
        end_s, first, found = time.monotonic() + timeout_s, 0, []
        for some in _batches(prompt.prompts):
            left_s = max(0.0, end_s - time.monotonic())
            try:
                found.append(await self.prepare(prompt=PromptList(some), timeout_s=left_s, **options))
            except MillraceError as error:
                raise _numbered(error, first) from error
            first += len(some)
        return msgspec.structs.replace(
            found[0],
            token_ids=tuple(chain.from_iterable(each.token_ids for each in found)),
            texts=tuple(chain.from_iterable(each.texts for each in found)),
        )

    async def _wire(self, parts: dict[str, Any], prompt: Prompt) -> bytes:
        """The request's bytes, of which nothing but them is kept: it may be sent again."""
        is_large = _num_characters(prompt) > _LARGE_CHARACTERS
        pauses = self._pauses() if self._pauses is not None and is_large else None
        request = tokenizer_pb2.PrepareRequest(**parts)
        if pauses is not None:
            await pauses.rest()
        # Not `ByteSize` first: protobuf writes a message to learn its size, too.
        wire = request.SerializeToString()
        del request
        if pauses is not None:
            await pauses.rest()
        return wire

    async def _answer(
        self, wire: bytes, traceparent: tuple[str, str], timeout_s: float, **about: str
    ) -> tokenizer_pb2.PrepareResponse:
        """The service's answer; one that is gone is waited for, within the request's own time."""
        began_s = last_there_s = time.monotonic()
        num_sent = 0
        while True:
            remaining_s = timeout_s - (time.monotonic() - began_s)
            try:
                return await self._prepare.call(wire, *traceparent, remaining_s, **about)
            except Unanswered as error:
                next_s = time.monotonic() + _RETRY_S * random.uniform(0.25, 0.5)
                if error.was_sent:
                    num_sent, last_there_s = num_sent + 1, time.monotonic()
                if num_sent == _MAX_SENT:
                    # Enough: it may be this request that the service does not survive.
                    raise _lost(num_sent, error) from error
                if next_s > last_there_s + self._comeback_s or next_s > began_s + timeout_s:
                    raise
            await asyncio.sleep(next_s - time.monotonic())

    async def validate(self, model: str, schema_json: str, text: str, *, context: Any) -> Verdict:
        """Judges a finished text by a schema as it was sent. Raises what the service refused."""
        request = tokenizer_pb2.ValidateOutputRequest(
            model=model, schema_json=schema_json, texts=[text], context=context
        )
        answer = await self._call(self._stub.ValidateOutput(request, timeout=PREPARE_TIMEOUT_S))
        return verdict(answer.verdicts[0])

    async def tokenize(
        self,
        model: str,
        prompt: Conversation | TextPrompt,
        *,
        context: Any,
        truncated_to: int = 0,
    ) -> Encoded:
        """Token ids of a text, or of a rendered conversation, for the tenant of the signed context; at most
        `truncated_to` unless that is 0.
        """
        request = tokenizer_pb2.TokenizeRequest(
            model=model,
            context=context,
            max_prompt_tokens=truncated_to or None,
            truncation=_truncation(bool(truncated_to)),
        )
        if isinstance(prompt, Conversation):
            request.conversation.CopyFrom(chat_pb2.Conversation(**conversation_fields(prompt)))
        else:
            request.text, request.add_special_tokens = prompt.text, prompt.add_special_tokens
        answer = await self._call(self._stub.Tokenize(request, timeout=PREPARE_TIMEOUT_S))
        return Encoded(token_ids=answer.token_ids, left_out=_left_out(answer))

    async def _call(self, call: Any) -> Any:
        try:
            return await call
        except grpc.RpcError as error:
            raise _unreachable(from_rpc_error(error, unavailable=Reason.TOKENIZER_UNAVAILABLE)) from error


def _truncation(truncates: bool) -> tokenizer_pb2.Truncation.ValueType:
    return tokenizer_pb2.TRUNCATION_KEEP_END if truncates else tokenizer_pb2.TRUNCATION_UNSPECIFIED


def _batches(prompts: Sequence[TextPrompt | TokenPrompt]) -> Iterator[tuple[TextPrompt | TokenPrompt, ...]]:
    some: list[TextPrompt | TokenPrompt] = []
    size = 0
    for prompt in prompts:
        added = len(prompt.token_ids) * 4 if isinstance(prompt, TokenPrompt) else _num_characters(prompt)
        if some and size + added > _LARGE_CHARACTERS:
            yield tuple(some)
            some, size = [], 0
        some.append(prompt)
        size += added
    yield tuple(some)


def _numbered(error: MillraceError, first: int) -> MillraceError:
    """The error of one of the texts from the index `first` on."""
    index, _, rest = error.field.removeprefix("texts[").partition("]")
    if not first or not error.field.startswith("texts[") or not index.isdigit():
        return error
    return MillraceError(
        error.reason,
        error.message.removeprefix(f"{error.field}: "),
        field=f"texts[{first + int(index)}]{rest}",
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def _text_input(prompt: TextPrompt | TokenPrompt) -> dict[str, Any]:
    if isinstance(prompt, TokenPrompt):
        return {"encoded": {"ids": prompt.token_ids}}
    return {"text": prompt.text, "pair": prompt.pair}


def _num_characters(prompt: Prompt) -> int:
    match prompt:
        case Conversation(messages=messages):
            return sum(len(each.content) for each in messages)
        case TextPrompt(text=text, pair=pair):
            return len(text) + len(pair or "")
        case PromptList(prompts=prompts):
            return sum(map(_num_characters, prompts))
        case _:
            return 0


def _lost(num_times: int, failure: MillraceError) -> MillraceError:
    return MillraceError(
        failure.reason,
        f"lost {num_times} times while it prepared this request, the last time because {failure.message}",
        retry_after_s=1.0,
    )


def _unreachable(failure: MillraceError) -> MillraceError:
    """The failure as it is, or, where nobody answered, with who that was."""
    if failure.reason is not Reason.TOKENIZER_UNAVAILABLE:
        return failure
    return MillraceError(
        Reason.TOKENIZER_UNAVAILABLE,
        f"the tokenizer service cannot be reached ({failure.message}); try again",
        retry_after_s=1.0,
    )
