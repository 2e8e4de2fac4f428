"""Endpoints that generate nothing: models, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from contract.chat import TextPrompt
from contract.errors import invalid
from gateway.config import RequestConfig
from gateway.faces.bodies import read
from gateway.faces.openai import chat
from gateway.faces.openai.answer_types import DetokenizedText, ModelCard, ModelList, SamplingDefault, Tokens
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.exchange import Exchange
from gateway.intake.intake import Slices
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.pooled import tasks_of
from gateway.pipeline.validate import check_conversation
from gateway.types.request import GenerationRequest

_encode = msgspec.json.Encoder().encode
MODELS_PREFIX = "/v1/models/"
# Ids of an answer that are written at once.
_TOGETHER = 4096


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt, or messages with what a chat request may say about them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[chat.MessageBody] | None = None
    tools: list[chat.ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


# Fields that have an effect on messages alone.
_OF_MESSAGES = ("tools", "chat_template_kwargs", "continue_final_message")
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class InspectEndpoints:
    """Handlers that need no engine slot."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        names = self._pipeline().catalog.names(exchange.verified_caller.identity)
        await exchange.respond(200, _encode(ModelList(data=list(map(self._model, names)))))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        name = exchange.path.removeprefix(MODELS_PREFIX)
        if not name:
            # /v1/models/ is what some clients make of a base URL.
            await self.models(exchange)
            return
        self._pipeline().catalog.check(exchange.verified_caller.identity, name)
        await exchange.respond(200, _encode(self._model(name)))

    def _model(self, name: str) -> ModelCard:
        pipeline = self._pipeline()
        served = pipeline.catalog.any_of(name)
        return ModelCard(
            id=name,
            created=0 if served is None else served.created_unix_s,
            max_model_len=(pipeline.max_model_len(served) if served else 0) or None,
            sampling_defaults={
                name: SamplingDefault(value, source) for name, value, source in pipeline.defaults(served)
            },
            tasks=[] if served is None else list(tasks_of(served)),
            state=pipeline.loads.state(served.key).state
            if served is not None and served.config.is_on_demand
            else msgspec.UNSET,
        )

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        convert = partial(_prompt_request, limits=pipeline.intake.limits)
        body, request = await read(exchange, pipeline.intake, _TOKENIZE, convert, chat.TOLERANCE)
        served = pipeline.model(caller, body.model)
        encoded = await pipeline.encode(caller, served, request)
        ids = encoded.token_ids
        if encoded.left_out is not None:
            exchange.add_headers({WARNING_HEADER: encoded.left_out.told(len(ids))})
        text_of = served.vocabulary.token_text
        answer = Tokens(
            count=len(ids),
            max_model_len=pipeline.max_model_len(served) or None,
            tokens=await _encoded(ids, list),
            token_strs=await _encoded(ids, lambda some: list(map(text_of, some)))
            if body.return_token_strs
            else msgspec.UNSET,
        )
        await exchange.respond(200, _encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        pipeline = self._pipeline()
        convert = partial(_check_num_ids, limits=pipeline.intake.limits)
        body, _ = await read(exchange, pipeline.intake, _DETOKENIZE, convert)
        caller = exchange.verified_caller
        served = pipeline.model(caller, body.model)
        text = await pipeline.decode(caller, served, body.tokens, "tokens")
        await exchange.respond(200, _encode(DetokenizedText(text)))


async def _encoded(ids: Sequence[int], shown: Callable[[Iterable[int]], list[Any]]) -> Any:
    """A JSON array as msgspec.Raw, made while others go on, because a long text has a million tokens."""
    slices = Slices()
    parts = []
    for start in range(0, len(ids), _TOGETHER):
        parts.append(_encode(shown(ids[start : start + _TOGETHER]))[1:-1])
        await slices.breathe()
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def _check_num_ids(body: DetokenizeBody, *, limits: RequestConfig) -> None:
    if len(body.tokens) > limits.max_token_ids:
        problem = f"{len(body.tokens)} token ids; the limit is {limits.max_token_ids}: send fewer"
        raise invalid("tokens", problem)


def _prompt_request(body: TokenizeBody, *, limits: RequestConfig) -> GenerationRequest:
    kind = "a prompt" if body.messages is None else "messages, whose template decides"
    for name in _OF_MESSAGES if body.messages is None else ("add_special_tokens",):
        if getattr(body, name) is not None:
            raise invalid(name, f"it has no effect with {kind}; leave it out")
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.messages is None:
        prompt = TextPrompt(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
        return GenerationRequest(model="", prompt=prompt, truncate_prompt_tokens=body.truncate_prompt_tokens)
    more = {name: getattr(body, name) for name in _OF_MESSAGES}
    asked = chat.ChatBody(model="", messages=body.messages, **more)
    conversation = chat.conversation(asked, reasons=True, limits=limits)
    request = GenerationRequest(
        model="",
        prompt=conversation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        field_names=chat.CONVERSATION_NAMES,
    )
    check_conversation(request, conversation)
    return request
