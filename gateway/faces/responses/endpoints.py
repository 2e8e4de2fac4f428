"""Handlers of the Responses API that need nothing kept: an answer, its tokens counted, a conversation made
short.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from contract.chat import Conversation, Message, Role
from contract.errors import MillraceError, Reason
from contract.outputs import FinishReason
from gateway.faces.accepted import AcceptedAnswer, write_events
from gateway.faces.bodies import read
from gateway.faces.responses.answer_types import CompactedResponse, CompactionItem, InputTokens, Response
from gateway.faces.responses.background import BackgroundResponses
from gateway.faces.responses.fields import FIELDS
from gateway.faces.responses.items import Open, text_of
from gateway.faces.responses.keeping import HeldRequest, kept, needs_store
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
# Characters of a client's own words in a header.
_MAX_WARNING = 512
_UNKEPT = ("store has no effect: answers are not kept; send earlier items again in input",)
_SUMMARISE = (
    "Summarise our conversation so far for an assistant that goes on with it and sees nothing else of it: "
    "what was asked for, what has been done and found out, names, paths and values that matter, and what is "
    "left to do. Write the summary alone."
)
_SUMMARY = "A summary of the conversation so far:\n\n"


class ResponseEndpoints:
    """Handlers below /v1/responses."""

    def __init__(self, pipeline: Callable[[], Pipeline], seal: Seal, store: Store | None = None) -> None:
        """`pipeline` raises what to answer while there is none yet; `seal` closes what clients keep."""
        self._pipeline = pipeline
        self._seal = seal
        self._store = store
        self.background = None if store is None else BackgroundResponses(pipeline, store, self)

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/responses."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        tenant = caller.identity.tenant

        def convert(body: ResponseBody) -> Asked | None:
            # What is in the store comes first.
            return None if needs_store(body) else self._asked(caller, body)

        body, understood = await read(exchange, pipeline.intake, RESPONSE_DECODER, convert, TOLERANCE)
        held = await kept(self._store, pipeline, caller, body, caller.identity.request_id)
        understood = await self.understand(caller, held.body, understood)
        _warn(exchange, [*understood.warnings, *(_UNKEPT if body.store and held.store is None else ())])
        if body.background:
            await self._in_background(exchange, held, understood)
            return
        async with AcceptedAnswer(exchange, pipeline, [understood.request]) as answer:
            _warn(exchange, _unenforced(answer.attempts[0]))
            writer = self.writer(held.body, understood, answer.attempts[0], streams=bool(body.stream))
            writer.response = held.told(writer.response)
            keep = partial(held.keep, tenant)
            with pipeline.intake.lease(tenant) as lease:
                if body.stream:
                    await _stream(exchange, answer, writer, lease, keep)
                else:
                    await _whole(answer, writer, lease, keep)
                    await exchange.respond(200, _encode(writer.response))

    async def understand(self, caller: Caller, body: ResponseBody, understood: Asked | None = None) -> Asked:
        """The domain request of a body whose input is complete."""
        return understood or self._asked(caller, body)

    def _asked(self, caller: Caller, body: ResponseBody) -> Asked:
        pipeline, unseal = self._pipeline(), partial(self._seal.open, caller.identity.tenant)
        return asked(body, reasons=pipeline.reasons, unseal=unseal, limits=pipeline.intake.limits)

    async def _in_background(self, exchange: Exchange, held: HeldRequest, understood: Asked) -> None:
        assert self.background is not None, "without a store it is refused"
        assert held.store is not None, "without a store it is refused"
        caller = exchange.verified_caller
        response, left_out = await self.background.create(caller, held, understood)
        exchange.add_headers(self._pipeline().limiter.headers(caller.identity))
        _warn(exchange, [] if left_out is None else [left_out])
        if held.body.stream:
            await stream_events(exchange, held.store, caller.identity.tenant, response.id, -1)
        else:
            await exchange.respond(200, _encode(response))

    async def count(self, exchange: Exchange) -> None:
        """POST /v1/responses/input_tokens."""
        pipeline, caller = self._pipeline(), exchange.verified_caller
        convert = partial(self._prompt, unseal=self._unseal(exchange))
        body, request = await read(exchange, pipeline.intake, PROMPT_DECODER, convert, TOLERANCE)
        _warn(exchange, FIELDS.check(body))
        served = pipeline.model(caller, body.model)
        num_tokens = len((await pipeline.encode(caller, served, request)).token_ids)
        await exchange.respond(200, _encode(InputTokens(input_tokens=num_tokens)))

    async def compact(self, exchange: Exchange) -> None:
        """POST /v1/responses/compact: the model summarises the conversation; the client keeps the summary
        sealed, as the last item of what it sends from now on.
        """
        pipeline, caller = self._pipeline(), exchange.verified_caller
        convert = partial(self._summary, unseal=self._unseal(exchange))
        body, request = await read(exchange, pipeline.intake, COMPACT_DECODER, convert, TOLERANCE)
        _warn(exchange, FIELDS.check(body))
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
                    *_said_by_user(body, request_id),
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
        )

    def _unseal(self, exchange: Exchange) -> Open:
        return partial(self._seal.open, exchange.verified_caller.identity.tenant)

    def _prompt(self, body: PromptBody, *, unseal: Open) -> GenerationRequest:
        pipeline = self._pipeline()
        conversation, _ = conversation_of(
            body, reasons=pipeline.reasons, unseal=unseal, limits=pipeline.intake.limits
        )
        request = GenerationRequest(
            model=body.model,
            prompt=conversation,
            truncate_prompt_tokens=cut_to(body),
            field_names=FIELD_NAMES,
        )
        check_conversation(request, conversation)
        return request

    def _summary(self, body: CompactBody, *, unseal: Open) -> GenerationRequest:
        prompt = PromptBody(model=body.model, input=body.input, instructions=body.instructions)
        request = self._prompt(prompt, unseal=unseal)
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


def _unenforced(attempt: Attempt) -> list[str]:
    report = attempt.info.enforcement
    if report is None or report.exact:
        return []
    parts = (*report.approximated, *report.unenforced)
    missed = ", ".join([f"{each.keyword} at {each.path}" for each in parts])
    # Paths are a client's words, and this is for a header: `ascii` writes what could end it as an escape.
    return [f"text.format is not enforced exactly: {ascii(missed)[1:-1][:_MAX_WARNING]}"]


def _said_by_user(body: CompactBody, request_id: str) -> list[dict[str, object]]:
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
    _, deltas = await anext(source)
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
        await exchange.end_events(writer.fail(error, answer.usages()[0]))
        raise
    except Exception:
        await exchange.end_events(writer.fail(unexpected(), answer.usages()[0]))
        raise
    writer.conclude(answer.usages()[0])
    writer.response = await keep(writer.response)
    await exchange.end_events(writer.end())
