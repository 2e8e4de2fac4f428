"""Handlers of Anthropic's API: messages, whole or streamed; counts of tokens; models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TypeVar

import msgspec

from contract.errors import MillraceError, Reason
from gateway.faces.accepted import AcceptedAnswer, first_deltas, write_events
from gateway.faces.anthropic.answer_types import InputTokenCount, MessageModel, MessageModelList
from gateway.faces.anthropic.answers import MessageWriter
from gateway.faces.anthropic.bodies import COUNT_TOKENS, MESSAGES, TOLERANCE, CountTokensBody, MessagesBody
from gateway.faces.anthropic.errors import error_event
from gateway.faces.anthropic.pages import AFTER, BEFORE, MAX_PAGE, asked_page
from gateway.faces.anthropic.requests import MessageRequest, eager_tools, message_request
from gateway.faces.anthropic.thoughts import PURPOSE, Thoughts
from gateway.faces.bodies import read
from gateway.faces.enforcement import unenforced
from gateway.faces.sealed import Seal
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.errors import unexpected
from gateway.http.exchange import Exchange
from gateway.pipeline.delta import ChoiceDelta
from gateway.pipeline.pipeline import Answer, Pipeline
from gateway.pipeline.validate import check_conversation

MODELS_PATH = "/v1/models"
_encode = msgspec.json.Encoder().encode
Body = TypeVar("Body", bound=CountTokensBody)
# The limits that other APIs' headers tell, in this one's words.
_LIMIT_HEADERS = {
    f"x-ratelimit-{part}-{unit}".encode(): f"anthropic-ratelimit-{unit}-{part}"
    for part in ("limit", "remaining")
    for unit in ("requests", "tokens")
}


class MessagesEndpoints:
    """The handlers."""

    def __init__(self, pipeline: Callable[[], Pipeline], secret: bytes) -> None:
        """`secret` is shared by all gateways of the deployment."""
        self._pipeline = pipeline
        self._seal = Seal(secret, PURPOSE)

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/messages."""
        pipeline = self._pipeline()
        thoughts = Thoughts(self._seal, exchange.verified_caller.identity.tenant)
        body, made = await self._read(exchange, MESSAGES, thoughts)
        async with AcceptedAnswer(exchange, pipeline, [made.request], streams=bool(body.stream)) as answer:
            _tell_limits(exchange)
            (attempt,) = answer.attempts
            for warning in unenforced(attempt.info.enforcement, made.request):
                exchange.add_headers({WARNING_HEADER: warning})
            writer = MessageWriter(
                attempt.info,
                tier=attempt.call.tier.openai_name,
                max_tokens=body.max_tokens,
                thoughts=thoughts,
                shows_thinking=not _omits_thinking(body),
                eager_tools=eager_tools(body),
                tells_timing=bool(body.include_timing),
            )
            if body.stream:
                await _stream(exchange, answer, writer)
                return
            gathered = ChoiceDelta()
            async for _, deltas in answer.deltas():
                attempt.first_chunk_written()
                for delta in deltas:
                    gathered.absorb(delta)
            await exchange.respond(200, writer.body(gathered, attempt.usage()))

    async def count_tokens(self, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        thoughts = Thoughts(self._seal, caller.identity.tenant)
        body, made = await self._read(exchange, COUNT_TOKENS, thoughts)
        check_conversation(made.request, made.conversation)
        served = pipeline.model(caller, body.model)
        encoded = await pipeline.encode(caller, served, made.request)
        await exchange.respond(200, _encode(InputTokenCount(len(encoded.token_ids))))

    async def models(self, exchange: Exchange) -> None:
        """GET /v1/models and /v1/models/{id}, of clients that speak this API."""
        catalog, identity = self._pipeline().catalog, exchange.verified_caller.identity
        name = exchange.path.removeprefix(MODELS_PATH).removeprefix("/")
        if name:
            catalog.check(identity, name)
            await exchange.respond(200, _encode(self._model(name)))
            return
        names, more = _page(exchange, catalog.names(identity))
        first, last = (names[0], names[-1]) if names else (None, None)
        page = MessageModelList(data=[*map(self._model, names)], has_more=more, first_id=first, last_id=last)
        await exchange.respond(200, _encode(page))

    async def _read(
        self, exchange: Exchange, decoder: msgspec.json.Decoder[Body], thoughts: Thoughts
    ) -> tuple[Body, MessageRequest]:
        """The body and its request; the response names what has no effect."""
        pipeline = self._pipeline()
        limits = pipeline.intake.limits
        convert = partial(message_request, reasons=pipeline.reasons, thoughts=thoughts, limits=limits)
        body, made = await read(exchange, pipeline.intake, decoder, convert, TOLERANCE)
        for warning in made.warnings:
            exchange.add_headers({WARNING_HEADER: warning})
        return body, made

    def _model(self, name: str) -> MessageModel:
        pipeline = self._pipeline()
        served = pipeline.catalog.any_of(name)
        created = datetime.fromtimestamp(0 if served is None else served.created_unix_s, UTC)
        longest = (pipeline.max_model_len(served) if served else 0) or None
        return MessageModel(
            id=name,
            display_name=name,
            created_at=created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            max_input_tokens=longest,
            max_tokens=longest,
        )


def _page(exchange: Exchange, names: Sequence[str]) -> tuple[Sequence[str], bool]:
    """The names that a query asks for, and whether there are more in its direction; raises UNSUPPORTED_FIELD,
    INVALID_ARGUMENT, and MODEL_NOT_FOUND for a name to begin at that is none.
    """
    limit, before, after = asked_page(exchange, MAX_PAGE)
    for field, name in ((BEFORE, before), (AFTER, after)):
        if name and name not in names:
            raise MillraceError(
                Reason.MODEL_NOT_FOUND,
                f"{field}: model {name[:80]!r} is not served here; available: {', '.join(names)}",
                field=field,
            )
    if before:
        earlier = names[: names.index(before)]
        return earlier[-limit:], len(earlier) > limit
    later = names[names.index(after) + 1 :] if after else names
    return later[:limit], len(later) > limit


def _tell_limits(exchange: Exchange) -> None:
    known = [(name, value) for name, value in exchange.extra_headers if name in _LIMIT_HEADERS]
    exchange.add_headers({_LIMIT_HEADERS[name]: value.decode() for name, value in known})


def _omits_thinking(body: MessagesBody) -> bool:
    return body.thinking is not None and body.thinking.display == "omitted"


async def _stream(exchange: Exchange, answer: Answer, writer: MessageWriter) -> None:
    # The status can still say what is wrong until the first delta is there.
    source = answer.deltas()
    _, deltas = await first_deltas(exchange, answer, source)
    (attempt,) = answer.attempts
    await exchange.begin_events()
    first = writer.begin(attempt.usage())
    try:
        await write_events(exchange, writer.events, deltas, first)
        attempt.first_chunk_written()
        async for _, deltas in source:
            await write_events(exchange, writer.events, deltas)
    except MillraceError as error:
        await exchange.end_events(error_event(error, exchange.request_id))
        raise
    except Exception:
        await exchange.end_events(error_event(unexpected(), exchange.request_id))
        raise
    await exchange.end_events(writer.end(attempt.usage()))
