"""Handlers of the Responses API that need nothing kept: an answer, its tokens counted, a conversation made
short.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import msgspec
from msgspec.structs import replace

from contract.chat import Conversation, Message, Role
from contract.errors import MillraceError, Reason
from contract.outputs import FinishReason
from gateway.faces.accepted import AcceptedAnswer, first_deltas, write_events
from gateway.faces.bodies import read
from gateway.faces.enforcement import unenforced
from gateway.faces.responses.answer_types import CompactedResponse, CompactionItem, InputTokens, Response
from gateway.faces.responses.background import BackgroundResponses
from gateway.faces.responses.fields import FIELDS
from gateway.faces.responses.items import text_of
from gateway.faces.responses.keeping import HeldRequest, LastResponse, continued, kept, needs_store
from gateway.faces.responses.requests import (
    COMPACT_DECODER,
    ENCRYPTED_REASONING,
    FIELD_NAMES,
    PROMPT_DECODER,
    RESPONSE_DECODER,
    TOLERANCE,
    Asked,
    CompactBody,
    PromptBody,
    ResponseBody,
    asked,
    conversation_of,
    cut_to,
)
from gateway.faces.responses.resource import resource
from gateway.faces.responses.stored import stream_events
from gateway.faces.responses.tools import MAX_JOINED_NAME
from gateway.faces.responses.writer import ResponseWriter, response_usage
from gateway.faces.sealed import Seal
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.errors import unexpected
from gateway.http.exchange import Exchange
from gateway.intake.intake import ByteLease
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.pipeline import Answer, Pipeline
from gateway.pipeline.validate import check_conversation
from gateway.store.store import Store
from gateway.types.request import Caller, GenerationRequest

_encode = msgspec.json.Encoder().encode
_UNKEPT = ("store has no effect: answers are not kept; send earlier items again in input",)
_SUMMARISE = (
    "Summarise our conversation so far for an assistant that goes on with it and sees nothing else of it: "
    "what was asked for, what has been done and found out, names, paths and values that matter, and what is "
    "left to do. Write the summary alone."
)
_SUMMARY = "A summary of the conversation so far:\n\n"
Created = TypeVar("Created", bound=ResponseBody)
# Adds to a resource.
_Tell: TypeAlias = Callable[[Response], Response]


class ResponseEndpoints:
    """Handlers below /v1/responses."""

    def __init__(self, pipeline: Callable[[], Pipeline], seal: Seal, store: Store | None = None) -> None:
        """`pipeline` raises what to answer while there is none yet; `seal` closes what clients keep."""
        self.pipeline = pipeline
        self._seal = seal
        self._store = store
        self.background = None if store is None else BackgroundResponses(pipeline, store, self)

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        body, understood = await self.read(exchange, RESPONSE_DECODER)
        held, understood = await self.held(exchange, body, understood)
        if body.background:
            await self._in_background(exchange, held, understood)
            return
        await self.answered(exchange, held, understood, streams=bool(body.stream))

    async def read(
        self,
        exchange: Exchange,
        decoder: msgspec.json.Decoder[Created],
        ready: Callable[[Created], Created] = lambda body: body,
    ) -> tuple[Created, Asked | None]:
        """The body, as `ready` makes it, and the domain request unless what is in the store comes first."""
        caller = exchange.verified_caller

        def convert(sent: Created) -> tuple[Created, Asked | None]:
            body = ready(sent)
            return body, None if needs_store(body) else self._asked(caller, body)

        _, understood = await read(exchange, self.pipeline().intake, decoder, convert, TOLERANCE)
        return understood

    async def held(
        self,
        exchange: Exchange,
        body: ResponseBody,
        understood: Asked | None,
        last: LastResponse | None = None,
    ) -> tuple[HeldRequest, Asked]:
        """The request with what it continues, and as it is understood then; warns of what has less effect."""
        caller = exchange.verified_caller
        request_id = caller.identity.request_id
        held = await kept(self._store, self.pipeline(), caller, body, request_id, last)
        understood = await self.understand(caller, held.body, understood)
        unkept = _UNKEPT if body.store and held.store is None else ()
        _warn(exchange, [*held.warnings, *understood.warnings, *unkept])
        return held, understood

    async def answered(
        self,
        exchange: Exchange,
        held: HeldRequest,
        understood: Asked,
        *,
        streams: bool,
        tell: _Tell | None = None,
    ) -> Response:
        """Answers an exchange; returns the resource as it is in the end. `tell` adds to it what is said of it
        from the beginning.
        """
        pipeline, tenant = self.pipeline(), exchange.verified_caller.identity.tenant
        async with AcceptedAnswer(exchange, pipeline, [understood.request], streams=streams) as answer:
            _warn(exchange, unenforced(answer.attempts[0].info.enforcement, understood.request))
            writer = self.writer(held.body, understood, answer.attempts[0], streams=streams)
            writer.response = held.told(writer.response)
            if tell is not None:
                writer.response = tell(writer.response)
            keep = partial(held.keep, tenant)
            with pipeline.intake.lease(tenant) as lease:
                if streams:
                    await _stream(exchange, answer, writer, lease, keep)
                else:
                    await _whole(answer, writer, lease, keep)
                    await exchange.respond(200, _encode(writer.response))
        return writer.response

    async def understand(self, caller: Caller, body: ResponseBody, understood: Asked | None = None) -> Asked:
        """The domain request of a body whose input is complete."""
        return understood or self._asked(caller, body)

    def _asked(self, caller: Caller, body: ResponseBody) -> Asked:
        pipeline, unseal = self.pipeline(), partial(self._seal.open, caller.identity.tenant)
        return asked(body, reasons=pipeline.reasons, unseal=unseal, limits=pipeline.intake.limits)

    async def _in_background(self, exchange: Exchange, held: HeldRequest, understood: Asked) -> None:
        assert self.background is not None, "without a store it is refused"
        assert held.store is not None, "without a store it is refused"
        caller = exchange.verified_caller
        response, left_out = await self.background.create(caller, held, understood)
        exchange.add_headers(self.pipeline().limiter.headers(caller.identity))
        _warn(exchange, [] if left_out is None else [left_out])
        if held.body.stream:
            await stream_events(exchange, held.store, caller.identity.tenant, response.id, -1)
        else:
            await exchange.respond(200, _encode(response))

    async def count(self, exchange: Exchange) -> None:
        """POST /v1/responses/input_tokens."""
        pipeline, caller = self.pipeline(), exchange.verified_caller
        body, request = await read(
            exchange, pipeline.intake, PROMPT_DECODER, partial(self._at_once, caller), TOLERANCE
        )
        _warn(exchange, FIELDS.check(body))
        if request is None:
            request = self._prompt(caller, await self._continued(exchange, body))
        served = pipeline.model(caller, body.model)
        num_tokens = len((await pipeline.encode(caller, served, request)).token_ids)
        await exchange.respond(200, _encode(InputTokens(input_tokens=num_tokens)))

    async def compact(self, exchange: Exchange) -> None:
        """POST /v1/responses/compact: the model summarises the conversation; the client keeps the summary
        sealed, as the last item of what it sends from now on.
        """
        pipeline, caller = self.pipeline(), exchange.verified_caller
        convert = partial(self._at_once, caller)
        body, prompt = await read(
            exchange, pipeline.intake, COMPACT_DECODER, lambda sent: convert(_prompt_of(sent)), TOLERANCE
        )
        _warn(exchange, FIELDS.check(body))
        given = _prompt_of(body)
        if prompt is None:
            given = await self._continued(exchange, given)
            prompt = self._prompt(caller, given)
        request = _summary(body, prompt)
        async with AcceptedAnswer(exchange, pipeline, [request]) as answer:
            text, end = "", None
            async for _, deltas in answer.deltas():
                answer.attempts[0].first_chunk_written()
                text += "".join([delta.content for delta in deltas])
                end = next((delta.finish_reason for delta in deltas if delta.finish_reason), end)
            if end is not FinishReason.STOP or not text.strip():
                # The client would put it in the place of the conversation.
                raise MillraceError(
                    Reason.INTERNAL,
                    "the model gave no whole summary; keep the conversation and send the request again",
                )
            request_id = answer.attempts[0].info.request_id
            sealed = self._seal.close(caller.identity.tenant, _SUMMARY + text.strip())
            compacted = CompactedResponse(
                id=f"resp_{request_id}",
                output=[
                    *_said_by_user(given, request_id),
                    CompactionItem(id=f"cmp_{request_id}", encrypted_content=sealed),
                ],
                created_at=int(time.time()),
                usage=response_usage(answer.usages()[0]),
            )
            await exchange.respond(200, _encode(compacted))

    def writer(
        self, body: ResponseBody, understood: Asked, attempt: Attempt, *, streams: bool
    ) -> ResponseWriter:
        """Who writes the answer of an accepted request."""
        tenant = attempt.call.caller.identity.tenant
        return ResponseWriter(
            resource(body, attempt),
            understood.tools,
            streams=streams,
            vocabulary=attempt.reader.texts.vocabulary if body.wants_logprobs else None,
            seal=partial(self._seal.close, tenant) if body.includes(ENCRYPTED_REASONING) else None,
            shows_reasoning=body.include_reasoning is not False,
            tells_timing=bool(body.include_timing),
        )

    def _at_once(self, caller: Caller, body: PromptBody) -> GenerationRequest | None:
        """What a prompt becomes; None where what is in the store comes first."""
        return None if needs_store(body) else self._prompt(caller, body)

    async def _continued(self, exchange: Exchange, body: PromptBody) -> PromptBody:
        """The body with what it continues in its input."""
        caller = exchange.verified_caller
        request_id = caller.identity.request_id
        found = await continued(self._store, self.pipeline(), caller, body, request_id)
        _warn(exchange, found.warnings)
        return replace(body, input=found.items)

    def _prompt(self, caller: Caller, body: PromptBody) -> GenerationRequest:
        pipeline, unseal = self.pipeline(), partial(self._seal.open, caller.identity.tenant)
        conversation, _ = conversation_of(
            body, reasons=pipeline.reasons, unseal=unseal, limits=pipeline.intake.limits
        )
        request = GenerationRequest(
            model=body.model,
            prompt=conversation,
            truncate_prompt_tokens=cut_to(body),
            max_tool_name=MAX_JOINED_NAME,
            field_names=FIELD_NAMES,
        )
        check_conversation(request, conversation)
        return request


def _prompt_of(body: CompactBody) -> PromptBody:
    return PromptBody(
        model=body.model,
        input=body.input,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
    )


def _summary(body: CompactBody, request: GenerationRequest) -> GenerationRequest:
    conversation = request.prompt
    assert isinstance(conversation, Conversation), "this API has conversations alone"
    ask = Message(role=Role.USER, content=_SUMMARISE)
    return replace(
        request,
        prompt=replace(conversation, messages=(*conversation.messages, ask)),
        service_tier=body.service_tier or "",
        prompt_cache_key=body.prompt_cache_key or "",
        cache_salt=body.cache_salt,
    )


def _warn(exchange: Exchange, warnings: Sequence[str]) -> None:
    for warning in warnings:
        exchange.add_headers({WARNING_HEADER: warning})


def _said_by_user(body: PromptBody, request_id: str) -> list[dict[str, object]]:
    """The user's messages, which a compacted conversation keeps as they are."""
    given = [] if isinstance(body.input, str) or body.input is None else body.input
    said = [body.input] if isinstance(body.input, str) else []
    said += [text_of(item.content, "input") for item in given if item.role == "user"]
    return [
        {
            "type": "message",
            "id": f"msg_{request_id}_{index}",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_text", "text": text}],
        }
        for index, text in enumerate(said)
    ]


# Stores an answer; gives it as it is told.
_Keep: TypeAlias = Callable[[Response], Awaitable[Response]]


async def _whole(answer: Answer, writer: ResponseWriter, lease: ByteLease, keep: _Keep) -> None:
    writer.begin()
    async for _, deltas in answer.deltas():
        answer.attempts[0].first_chunk_written()
        for delta in deltas:
            writer.event(delta)
        lease.grow(writer.take_num_kept())
    writer.conclude(answer.usages()[0])
    writer.response = await keep(writer.response)


async def _stream(
    exchange: Exchange, answer: Answer, writer: ResponseWriter, lease: ByteLease, keep: _Keep
) -> None:
    # The status can still say what is wrong until the first delta is there.
    source = answer.deltas()
    _, deltas = await first_deltas(exchange, answer, source)
    await exchange.begin_events()
    first = writer.begin()
    try:
        await write_events(exchange, writer.event, deltas, first)
        answer.attempts[0].first_chunk_written()
        async for _, deltas in source:
            answer.attempts[0].first_chunk_written()
            await write_events(exchange, writer.event, deltas)
            lease.grow(writer.take_num_kept())
    except MillraceError as error:
        await _broken_off(exchange, answer, writer, keep, error)
        raise
    except Exception:
        await _broken_off(exchange, answer, writer, keep, unexpected())
        raise
    writer.conclude(answer.usages()[0])
    writer.response = await keep(writer.response)
    await exchange.end_events(writer.end())


async def _broken_off(
    exchange: Exchange, answer: Answer, writer: ResponseWriter, keep: _Keep, error: MillraceError
) -> None:
    """Ends a stream whose client has heard of the response: what there is of it is kept."""
    usage = answer.usages()[0]
    last = writer.cancel(usage) if exchange.client_gone else writer.fail(error, usage)
    writer.response = await keep(writer.response)
    await exchange.end_events(last)
