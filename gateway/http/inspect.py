"""Endpoints that generate nothing: models, /tokenize, /detokenize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from contract.chat import TextPrompt
from contract.errors import invalid
from gateway.http import chat
from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.validate import check_conversation
from gateway.types.request import GenerationRequest

_encode = msgspec.json.Encoder().encode
MODELS_PREFIX = "/v1/models/"


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /tokenize: a prompt, or messages with what a chat request may say about them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[chat.MessageBody] | None = None
    tools: list[chat.ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


# What only says something about messages.
_OF_MESSAGES = ("tools", "chat_template_kwargs", "continue_final_message")
_TOKENIZE = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeBody)


class InspectEndpoints:
    """Handlers that need no engine slot."""

    def __init__(self, pipeline: Callable[[], Pipeline]) -> None:
        self._pipeline = pipeline

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        names = self._pipeline().served_names(exchange.verified_caller)
        models = [self._model(name) for name in names]
        await exchange.respond(200, _encode({"object": "list", "data": models}))

    async def model(self, exchange: Exchange) -> None:
        """GET /v1/models/{id}."""
        name = exchange.path.removeprefix(MODELS_PREFIX)
        self._pipeline().check_model(exchange.verified_caller, name)
        await exchange.respond(200, _encode(self._model(name)))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._pipeline().created_unix_s,
            "owned_by": "millrace",
            "max_model_len": self._pipeline().fleet.max_model_len or None,
        }

    async def tokenize(self, exchange: Exchange) -> None:
        """POST /tokenize."""
        body = decode(_TOKENIZE, exchange.body())
        self._check_model(exchange, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("prompt", "give either prompt or messages")
        ids = await self._pipeline().encode(_prompt_request(body), body.add_special_tokens)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": self._pipeline().fleet.max_model_len or None,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = [self._pipeline().vocabulary.token_text(id_) for id_ in ids]
        await exchange.respond(200, _encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        """POST /detokenize."""
        body = decode(_DETOKENIZE, exchange.body())
        self._check_model(exchange, body.model)
        await exchange.respond(200, _encode({"prompt": self._pipeline().decode(body.tokens, "tokens")}))

    def _check_model(self, exchange: Exchange, name: str | None) -> None:
        pipeline, caller = self._pipeline(), exchange.verified_caller
        # All names stand for one vocabulary: without a name, any that the caller may use will do.
        usable = next(iter(pipeline.served_names(caller)), pipeline.model.served_name)
        pipeline.check_model(caller, usable if name is None else name)


def _prompt_request(body: TokenizeBody) -> GenerationRequest:
    kind = "a prompt" if body.messages is None else "messages, whose template decides"
    for name in _OF_MESSAGES if body.messages is None else ("add_special_tokens",):
        if getattr(body, name) is not None:
            raise invalid(name, f"it has no effect with {kind}; leave it out")
    if body.messages is None:
        return GenerationRequest(model="", prompt=TextPrompt(body.prompt or ""))
    more = {name: getattr(body, name) for name in _OF_MESSAGES}
    asked = chat.ChatBody(model="", messages=body.messages, **more)
    conversation = chat.conversation(asked, reasons=True)
    request = GenerationRequest(model="", prompt=conversation, field_names=chat.CONVERSATION_NAMES)
    check_conversation(request, conversation)
    return request
