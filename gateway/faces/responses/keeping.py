"""What a request of the Responses API takes from the store, and what is kept of its answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import MillraceError, Reason, context_length, invalid
from gateway.faces.responses.answer_types import ID_PREFIXES, Response
from gateway.faces.responses.items import InputItem
from gateway.faces.responses.requests import PromptBody, ResponseBody
from gateway.http.exchange import Exchange
from gateway.pipeline.pipeline import Pipeline
from gateway.store.database import StoredItem, not_found
from gateway.store.responses import NewResponse
from gateway.store.store import Store, storing
from gateway.store.tables import MAX_ID
from gateway.types.request import Caller

_log = logging.getLogger(__name__)
# Bytes of a history that are read for a token that a model may have: what is longer, no model could take.
_BYTES_PER_TOKEN = 16
# Statuses of answers that a conversation takes.
_ANSWERED = ("completed", "incomplete")
# Where no engine says how much a model takes.
_UNKNOWN_TOKENS = 32 * 1024
_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")


class LastResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The last response of a connection, which the next one may continue whether or not it is kept."""

    id: str
    # Of the whole conversation, its output included.
    items: Sequence[InputItem]
    is_stored: bool


class HeldRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request with what came before it in its input, and where its answer goes."""

    body: ResponseBody
    # None: the answer is not kept.
    store: Store | None = None
    # The items that are kept with the response: those that the request itself brought, and those before them
    # that are kept nowhere else.
    inputs: Sequence[StoredItem] = ()
    previous_id: str = ""
    # Whether the response that it continues is kept, too.
    follows_stored: bool = True
    conversation_id: str = ""
    warnings: tuple[str, ...] = ()

    def told(self, response: Response) -> Response:
        """The resource with what is true of keeping it."""
        return replace(
            response,
            store=self.store is not None,
            previous_response_id=self.previous_id or None,
            conversation={"id": self.conversation_id} if self.conversation_id else msgspec.UNSET,
        )

    def new(self, response: Response) -> NewResponse:
        """What is stored."""
        return NewResponse(
            id=response.id,
            resource=plain(response),
            inputs=self.inputs,
            previous_id=self.previous_id if self.follows_stored else "",
            conversation_id=self.conversation_id if response.status in _ANSWERED else "",
        )

    def last(self, response: Response) -> LastResponse:
        """What a request after this one continues, where it is on the same connection."""
        given = self.body.input or ()
        before = [InputItem(role="user", content=given)] if isinstance(given, str) else given
        output = [_decode_item(each.body) for each in self.new(response).outputs]
        return LastResponse(id=response.id, items=[*before, *output], is_stored=response.store)

    async def keep(self, tenant: str, response: Response) -> Response:
        """Stores an answer, before its client hears that it is complete. It is the client's whether or not
        that succeeds: the resource says it.
        """
        if self.store is None:
            return response
        try:
            await self.store.call(self.store.responses.put, tenant, self.new(response))
        except MillraceError as error:
            _log.error("response %s is answered and not stored: %s", response.id, error.message)
            return replace(response, store=False)
        return response


def plain(response: Response) -> dict[str, Any]:
    """A resource as JSON has it."""
    resource: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(response))
    return resource


def needs_store(body: PromptBody) -> bool:
    """Whether something of a request's input is in the store; raises INVALID_ARGUMENT for empty ids."""
    if body.previous_response_id == "":
        raise invalid("previous_response_id", "it is empty; send the id of a response, or leave it out")
    if body.conversation is not None and not _conversation_id(body):
        raise invalid("conversation", "its id is empty; send the id of a conversation, or leave it out")
    references = _references(body)
    for index, id_ in references.items():
        if not id_:
            raise invalid(f"input[{index}].id", "it is required in a reference to an item")
    return bool(body.previous_response_id or body.conversation is not None or references)


class Continued(msgspec.Struct, frozen=True, kw_only=True):
    """What a request brings, and what stands before it."""

    history: Sequence[InputItem]
    given: list[StoredItem]
    warnings: tuple[str, ...] = ()
    # Whether what stands before it is kept, too.
    is_stored: bool = True

    @property
    def items(self) -> list[InputItem]:
        """The whole input."""
        return [*self.history, *map(_item, self.given)]


async def kept(
    store: Store | None,
    pipeline: Pipeline,
    caller: Caller,
    body: ResponseBody,
    request_id: str,
    last: LastResponse | None = None,
) -> HeldRequest:
    """What the request continues and where its answer goes; raises as `continued` and `storing` do."""
    tenant = caller.identity.tenant
    keeps = storing(store, tenant, asked=body.store, background=bool(body.background))
    if not needs_store(body):
        if keeps is None:
            return HeldRequest(body=body)
        inputs = stored_items(body.input, request_id)
        await keeps.call(keeps.check_room, tenant, sum(len(each.body) for each in inputs))
        return HeldRequest(body=body, store=keeps, inputs=inputs)
    conversation_id = _conversation_id(body)
    if conversation_id and keeps is None and body.store is False:
        raise invalid("store", "an answer within a conversation is kept in it; send store true")
    found = await continued(store, pipeline, caller, body, request_id, last)
    before = [] if found.is_stored or keeps is None else stored_items(list(found.history), f"{request_id}_h")
    return HeldRequest(
        body=replace(body, input=found.items),
        store=keeps,
        inputs=[*before, *found.given],
        previous_id=body.previous_response_id or "",
        follows_stored=found.is_stored,
        conversation_id=conversation_id,
        warnings=found.warnings,
    )


async def continued(
    store: Store | None,
    pipeline: Pipeline,
    caller: Caller,
    body: PromptBody,
    request_id: str,
    last: LastResponse | None = None,
) -> Continued:
    """Looks up what the request continues, `last` of its own connection before the store. Raises
    STORED_NOT_FOUND for what is not there, UNSUPPORTED_FIELD where the tenant's state is not kept,
    CONTEXT_LENGTH_EXCEEDED for what is longer than any prompt.
    """
    tenant, limits = caller.identity.tenant, pipeline.intake.limits
    conversation_id = _conversation_id(body)
    if body.previous_response_id and conversation_id:
        raise invalid("previous_response_id", "it is given beside conversation; give one of them")
    references = _references(body)
    if len(references) > limits.max_messages:
        raise invalid("input", f"{len(references)} references to items; the limit is {limits.max_messages}")
    if last is not None and last.id != body.previous_response_id:
        last = None
    if last is not None and not references:
        given, history, is_cut = stored_items(body.input, request_id), list(last.items), False
    else:
        source = _source(store, tenant, body)
        max_tokens = pipeline.max_model_len(pipeline.model(caller, body.model))
        max_bytes = (max_tokens or _UNKNOWN_TOKENS) * _BYTES_PER_TOKEN
        asked = replace(body, previous_response_id=None) if last is not None else body
        given, found, is_cut = await source.call(
            _load, source, tenant, asked, conversation_id, request_id, max_bytes
        )
        history = list(map(_item, found)) if last is None else list(last.items)
        if is_cut and body.truncation != "auto":
            problem = "what is stored before this request is longer; send truncation auto, or begin anew"
            raise MillraceError(Reason.CONTEXT_LENGTH_EXCEEDED, context_length(max_tokens, problem))
    # A call that was cut is no call: its arguments break off, and nothing was called.
    history = [each for each in history if not (each.type in _CALLS and each.status == "incomplete")]
    warnings: tuple[str, ...] = ()
    if body.truncation == "auto":
        room = max(0, limits.max_messages - len(given) - 1)
        history, given, warnings = _shortened(history, given, room, is_cut)
    if body.previous_response_id and not warnings and not isinstance(body.input, str):
        _check_results(history, body.input or ())
    return Continued(
        history=history, given=given, warnings=warnings, is_stored=last is None or last.is_stored
    )


def _check_results(history: Sequence[InputItem], given: Sequence[InputItem]) -> None:
    """Raises INVALID_ARGUMENT for the result of a call that the response before it did not make."""
    calls = {each.call_id for each in [*history, *given] if each.type in _CALLS}
    for index, item in enumerate(given):
        if item.type in _RESULTS and item.call_id and item.call_id not in calls:
            problem = f"no call with the id {item.call_id[:MAX_ID]!r} is in this conversation"
            raise invalid(f"input[{index}].call_id", problem)


def _shortened(
    history: list[InputItem], given: list[StoredItem], room: int, is_cut: bool
) -> tuple[list[InputItem], list[StoredItem], tuple[str, ...]]:
    """The newest of what was found, without results of calls that are not there, and what is told."""
    newest = history[len(history) - room :] if len(history) > room else history
    if newest is history and not is_cut:
        return history, given, ()
    calls = {each.call_id for each in [*newest, *map(_item, given)] if each.type in _CALLS}

    def is_left(item: InputItem) -> bool:
        return item.type not in _RESULTS or item.call_id in calls

    newest = [each for each in newest if is_left(each)]
    brought = [each for each in given if is_left(_item(each))]
    told = f"truncation left out all stored items but the newest {len(newest)}, which the model has not seen"
    if len(brought) < len(given):
        told += f"; {len(given) - len(brought)} results in input went with their calls"
    return newest, brought, (told,)


def _source(store: Store | None, tenant: str, body: PromptBody) -> Store:
    field = next((f"input[{index}].id" for index in _references(body)), "input")
    if body.previous_response_id:
        field = "previous_response_id"
    elif body.conversation is not None:
        field = "conversation"
    return kept_by(store, tenant, field)


def store_of(exchange: Exchange, store: Store | None, kind: str, id_: str) -> tuple[Store, str]:
    """The store of a caller's tenant, and the tenant; raises STORED_NOT_FOUND where nothing of it is kept."""
    tenant = exchange.verified_caller.identity.tenant
    if store is None or not store.keeps(tenant):
        raise not_found(kind, id_)
    return store, tenant


def kept_by(store: Store | None, tenant: str, field: str) -> Store:
    """The store of a tenant whose state is kept; raises UNSUPPORTED_FIELD at `field` for others."""
    if store is None or not store.keeps(tenant):
        problem = "this deployment keeps no responses of your tenant"
        remedy = "send earlier items in input, or have the operator add your tenant to gateway.store.tenants"
        raise MillraceError(Reason.UNSUPPORTED_FIELD, f"{field}: {problem}; {remedy}", field=field)
    return store


def _load(
    store: Store,
    tenant: str,
    body: PromptBody,
    conversation_id: str,
    request_id: str,
    max_bytes: int,
) -> tuple[list[StoredItem], list[StoredItem], bool]:
    """The request's own items, what came before them, and whether that is cut."""
    references = _references(body)
    found = store.find_items(tenant, list(references.values())) if references else {}
    for index, id_ in references.items():
        if id_ not in found:
            raise not_found("Item", id_, f"input[{index}].id")
    given = stored_items(body.input, request_id, found)
    if sum(len(each.body) for each in given) > max_bytes:
        problem = "the items that input refers to are longer than any prompt; leave some of them out"
        raise MillraceError(Reason.CONTEXT_LENGTH_EXCEEDED, problem, field="input")
    store.check_room(tenant, sum(len(each.body) for each in given))
    if body.previous_response_id:
        history = store.responses.history(tenant, body.previous_response_id, max_bytes=max_bytes)
        return given, history.items, history.is_cut
    if conversation_id:
        items, is_cut = store.conversations.history(tenant, conversation_id, max_bytes=max_bytes)
        return given, items, is_cut
    return given, [], False


def stored_items(
    given: str | Sequence[InputItem] | None, name: str, found: dict[str, StoredItem] | None = None
) -> list[StoredItem]:
    """Items as they are kept, each with an id that derives from `name` unless it has one; references are
    replaced by what was `found` for them.
    """
    if given is None:
        return []
    items = [InputItem(role="user", content=given)] if isinstance(given, str) else given
    made: list[StoredItem] = []
    for index, item in enumerate(items):
        if found and _is_reference(item):
            made.append(found[item.id or ""])
            continue
        kind = item.type or "message"
        fields = sent(item)
        id_ = fields.pop("id", "")
        if not id_ or len(id_) > MAX_ID:
            id_ = f"{ID_PREFIXES.get(kind, 'item_')}{name[-40:]}_i{index}"
        if kind == "message" and isinstance(fields.get("content"), str):
            of = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": of, "text": fields["content"]}]
        body = {"id": id_, "type": kind, "status": "completed", **fields}
        made.append(StoredItem(id_, msgspec.json.encode(body)))
    return made


def sent(value: Any) -> Any:
    """What was sent of a body, or of a part of one, as JSON can write it."""
    if isinstance(value, list):
        return [sent(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    return {
        name: sent(each)
        for name, each in fields.items()
        if each is not None and not (isinstance(each, msgspec.Raw) and not bytes(each))
    }


_decode_item: Callable[[bytes], InputItem] = msgspec.json.Decoder(InputItem).decode


def _item(stored: StoredItem) -> InputItem:
    return _decode_item(stored.body)


def _references(body: PromptBody) -> dict[int, str]:
    """The ids of items that the input names, by their place in it."""
    if body.input is None or isinstance(body.input, str):
        return {}
    return {index: item.id or "" for index, item in enumerate(body.input) if _is_reference(item)}


def _is_reference(item: InputItem) -> bool:
    return item.type == "item_reference" or (item.type is None and item.role is None and item.id is not None)


def _conversation_id(body: PromptBody) -> str:
    match body.conversation:
        case None:
            return ""
        case str() as id_:
            return id_
        case other:
            return other.id
