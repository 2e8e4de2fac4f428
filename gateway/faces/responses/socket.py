"""The WebSocket mode of the Responses API, after the Open Responses specification of 2026-04-24.

A client sends `response.create` events with the fields of a create body, and gets the events of a stream
as text frames. What it sends is answered as a POST is. The connection keeps its last response, which the next
one may continue even where nothing is stored; a continuation that fails drops it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.chat import Conversation, Message, Role
from contract.errors import MillraceError, Reason, invalid, unsupported
from contract.sampling import SamplingOptions
from gateway.faces.accepted import AcceptedAnswer
from gateway.faces.bodies import IGNORED_HEADER
from gateway.faces.responses.answer_types import Response
from gateway.faces.responses.endpoints import ResponseEndpoints
from gateway.faces.responses.fields import FIELDS
from gateway.faces.responses.items import InputItem
from gateway.faces.responses.keeping import HeldRequest, LastResponse
from gateway.faces.responses.requests import Asked, ResponseBody
from gateway.faces.unserved import WARNING_HEADER
from gateway.http.exchange import Exchange
from gateway.intake.intake import LARGE_BYTES, ByteLease
from gateway.store.database import not_found
from gateway.types.error_form import ErrorForm

CREATE = "response.create"
_encode = msgspec.json.Encoder().encode
# Headers that say something of a connection, or of a body, that a frame does not have.
_NOT_TOLD = ("content-", "x-millrace-tenant", "x-millrace-key", "www-authenticate")


class CreateEvent(ResponseBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The one event that a client sends."""

    type: str
    # False makes the prompt ready and generates nothing.
    generate: bool | None = None


class _AnyEvent(msgspec.Struct, frozen=True):
    """Of any event its type, which says what else is to be in it."""

    type: str = ""


_DECODER = msgspec.json.Decoder(FIELDS.declared_in(CreateEvent))
_TYPE_DECODER = msgspec.json.Decoder(_AnyEvent)


class ResponseSocket:
    """One connection."""

    def __init__(self, endpoints: ResponseEndpoints, form: ErrorForm) -> None:
        self._endpoints = endpoints
        self._form = form
        self._last: LastResponse | None = None
        self._lease: ByteLease | None = None

    async def answer(self, turn: Exchange) -> None:
        """One event of the client's, to its end."""
        continues = ""

        def ready(event: CreateEvent) -> CreateEvent:
            nonlocal continues
            continues = event.previous_response_id or ""
            return _checked(event)

        try:
            _check_type(turn)
            event, understood = await self._endpoints.read(turn, _DECODER, ready)
            if event.store is False and continues and (self._last is None or continues != self._last.id):
                # As the specification has it: what keeps nothing finds nothing that is kept.
                raise not_found("Previous response", continues, "previous_response_id")
            held, understood = await self._endpoints.held(turn, event, understood, self._last)
            if event.generate is False:
                response = await self._warm_up(turn, held, understood)
            else:
                response = await self._endpoints.answered(
                    turn, held, understood, streams=True, tell=partial(_warned, turn)
                )
        except BaseException:
            if self._last is not None and continues == self._last.id:
                self._forget()
            raise
        self._remember(turn, held.last(response))

    async def _warm_up(self, turn: Exchange, held: HeldRequest, understood: Asked) -> Response:
        """Has an engine compute the prompt, whose blocks the next turn then finds. A token is made, as each
        answer begins with one, and told to nobody.
        """
        pipeline = self._endpoints.pipeline()
        request, prompt = understood.request, understood.request.prompt
        assert isinstance(prompt, Conversation), "this API has conversations alone"
        if all(each.role is not Role.USER for each in prompt.messages):
            # Templates want a turn of the user's.
            prompt = replace(prompt, messages=(*prompt.messages, Message(role=Role.USER, content="")))
        request = replace(
            request,
            prompt=prompt,
            sampling=SamplingOptions(max_tokens=1),
            response_format=None,
            test_time=None,
        )
        async with AcceptedAnswer(turn, pipeline, [request]) as answer:
            writer = self._endpoints.writer(held.body, understood, answer.attempts[0], streams=True)
            writer.response = _warned(turn, held.told(writer.response))
            async for _ in answer.deltas():
                answer.attempts[0].first_chunk_written()
            await turn.begin_events()
            await turn.write(writer.begin())
            writer.response = await held.keep(
                turn.verified_caller.identity.tenant,
                replace(
                    writer.response,
                    status="completed",
                    completed_at=int(time.time()),
                    **writer.counted(answer.usages()[0]),
                ),
            )
            await turn.end_events(writer.end())
        return writer.response

    def _remember(self, turn: Exchange, last: LastResponse) -> None:
        self._forget()
        lease = self._endpoints.pipeline().intake.lease(turn.verified_caller.identity.tenant)
        try:
            lease.grow(sum(map(_size, last.items)))
        except MillraceError:
            # There is no room: the client is told with its next event, and sends the items again.
            return
        self._last, self._lease = last, lease

    def _forget(self) -> None:
        if self._lease is not None:
            self._lease.release()
        self._last = self._lease = None

    def close(self) -> None:
        """See SocketHandler."""
        self._forget()

    def frame_of(self, error: MillraceError, headers: Mapping[str, str] | None = None) -> bytes:
        """See SocketHandler."""
        told = msgspec.json.decode(self._form.body(error))["error"]
        status = self._form.status(error)
        is_unknown = error.reason in (Reason.STORED_NOT_FOUND, Reason.UNSUPPORTED_FIELD)
        if is_unknown and error.field == "previous_response_id":
            # The code by which clients know that they have to send their items again.
            status, told["code"] = 400, "previous_response_not_found"
        return _error_event(status, told, headers or self._form.headers(error))

    def expired(self, lifetime_s: float) -> bytes:
        """See SocketHandler."""
        message = (
            f"this WebSocket has reached its longest time, {lifetime_s / 60:g} minutes "
            "(gateway.socket.lifetime_s); open another one"
        )
        code = "websocket_connection_limit_reached"
        told = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
        return _error_event(400, told, {})


def _error_event(status: int, error: dict[str, Any], headers: Mapping[str, str]) -> bytes:
    """Its parts stand beside the error as well, where OpenAI's SDKs read them."""
    event: dict[str, Any] = {"type": "error", "status": status, "error": error}
    event |= {name: error[name] for name in ("code", "message", "param")}
    event["headers"] = {name: value for name, value in headers.items() if not name.startswith(_NOT_TOLD)}
    return _encode(event)


def _check_type(turn: Exchange) -> None:
    """Raises for an event of another type, whatever else is in it; what is no event is told by its reader."""
    data = turn.peek_body()
    if len(data) > LARGE_BYTES:
        return
    try:
        kind = _TYPE_DECODER.decode(data).type
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    if kind:
        _check_known(kind)


def _check_known(kind: str) -> None:
    if kind != CREATE:
        raise invalid("type", f"{kind[:80]!r} is not served; send {CREATE}")


def _checked(event: CreateEvent) -> CreateEvent:
    """The event as the body of a stream; raises for what a POST alone can ask for."""
    _check_known(event.type)
    if event.stream is False:
        raise unsupported("stream", "leave it out, or use POST", "events are all that a WebSocket has")
    if event.background:
        raise unsupported("background", "leave it out, or use POST", "a WebSocket has its client to tell")
    return replace(event, stream=True)


def _size(item: InputItem) -> int:
    """Characters of an item."""
    texts = [item.arguments, item.input, item.encrypted_content]
    for part in (item.content, item.output, item.summary):
        texts += [part] if isinstance(part, str) else [each.text or each.refusal for each in part or ()]
    return sum(len(text) for text in texts if text)


def _warned(turn: Exchange, response: Response) -> Response:
    """The resource with what HTTP says in headers."""
    told = [
        value.decode("latin-1")
        if header == WARNING_HEADER.encode()
        else f"ignored: {value.decode('latin-1')}"
        for header, value in turn.extra_headers
        if header in (WARNING_HEADER.encode(), IGNORED_HEADER.encode())
    ]
    return replace(response, warnings=told) if told else response
