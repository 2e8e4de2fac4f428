"""Handlers of /v1/messages/batches: batches of messages, and how their results are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason, invalid
from gateway.batches.content import Upload, disk_full
from gateway.batches.lines import MAX_CUSTOM_ID
from gateway.batches.service import Batches
from gateway.batches.types import LineOutcome, LineResult, RequestBatch, ResultForm
from gateway.faces.anthropic.errors import ERRORS
from gateway.faces.anthropic.pages import BETA, asked_page
from gateway.faces.queries import Query, dispatch
from gateway.http.body import decode
from gateway.http.exchange import Exchange
from gateway.intake.intake import Intake

BATCHES = "/v1/messages/batches"
MESSAGES = "/v1/messages"
API = "anthropic"
# Its ids begin otherwise.
_PREFIX, _OWN_PREFIX = "msgbatch_", "batch_"
# Files behind batches, which no API shows as files.
_INPUT, _OUTPUT = "messages_input", "messages_output"
_WINDOW = "24h"
_PAGE = 20
# Where a request's `params` stand in the lines that batches run.
_LINE_BODY = "body."
_WRITTEN_TOGETHER = 256
_encode = msgspec.json.Encoder().encode
_TYPES = {
    LineOutcome.SUCCEEDED: "succeeded",
    LineOutcome.ERRORED: "errored",
    LineOutcome.CANCELLED: "canceled",
    LineOutcome.EXPIRED: "expired",
}


class BatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `requests`; `params` is a body of /v1/messages."""

    custom_id: str
    params: msgspec.Raw


class MessageBatchBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of POST /v1/messages/batches."""

    requests: list[BatchRequest]


_DECODER = msgspec.json.Decoder(MessageBatchBody)


class MessageBatchEndpoints:
    """The handlers. `intake` raises what to answer while there is none yet."""

    def __init__(self, batches: Batches, intake: Callable[[], Intake]) -> None:
        self._batches = batches
        self._intake = intake

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/messages/batches."""
        batches, identity = self._batches, exchange.verified_caller.identity
        async with self._intake().exclusive(identity.tenant) as slices:
            body = decode(_DECODER, exchange.take_body())
            await slices.rest()
            _check(body.requests, batches.config.max_lines)
            await slices.rest()
        try:
            upload = await batches.call(batches.begin_upload)
            try:
                await batches.call(_write, upload, body.requests)
                file = await batches.keep(
                    identity.tenant, upload, purpose=_INPUT, filename="requests.jsonl", kept_s=0
                )
            finally:
                await batches.call(upload.discard)
        except OSError as error:
            raise disk_full(error, batches.folder) from error
        batch = batches.new(identity, api=API, endpoint=MESSAGES, file=file, window=_WINDOW, metadata={})
        batch.num_lines = len(body.requests)
        try:
            await batches.create(identity, batch)
        except MillraceError:
            await batches.delete_file(identity.tenant, file.id)
            raise
        await exchange.respond(200, _encode(_object(exchange, batch)))

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/messages/batches."""
        limit, before, after = asked_page(exchange, _PAGE)
        order, start = ("asc", before) if before else ("desc", after)
        tenant = exchange.verified_caller.identity.tenant
        with _named(start):
            found, more = await self._batches.page(tenant, API, limit=limit, order=order, after=_own(start))
        data = [_object(exchange, each) for each in (reversed(found) if before else found)]
        first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
        page = {"data": data, "has_more": more, "first_id": first, "last_id": last}
        await exchange.respond(200, _encode(page))

    async def handle(self, exchange: Exchange) -> None:
        """Any method, for any path below /v1/messages/batches/."""
        id_, _, part = exchange.path.removeprefix(f"{BATCHES}/").partition("/")
        handlers = {
            "": {"GET": self._get, "DELETE": self._delete},
            "cancel": {"POST": self._cancel},
            "results": {"GET": self._results},
        }
        await dispatch(exchange, handlers.get(part), id_)

    async def _get(self, exchange: Exchange, id_: str) -> None:
        await exchange.respond(200, _encode(_object(exchange, await self._find(exchange, id_))))

    async def _find(self, exchange: Exchange, id_: str) -> RequestBatch:
        Query(exchange, (BETA,))
        with _named(id_):
            return await self._batches.get(exchange.verified_caller.identity.tenant, API, _own(id_))

    async def _cancel(self, exchange: Exchange, id_: str) -> None:
        Query(exchange, (BETA,))
        with _named(id_):
            batch = await self._batches.cancel(exchange.verified_caller.identity.tenant, API, _own(id_))
        await exchange.respond(200, _encode(_object(exchange, batch)))

    async def _delete(self, exchange: Exchange, id_: str) -> None:
        Query(exchange, (BETA,))
        with _named(id_):
            await self._batches.delete_batch(exchange.verified_caller.identity.tenant, API, _own(id_))
        await exchange.respond(200, _encode({"id": id_, "type": "message_batch_deleted"}))

    async def _results(self, exchange: Exchange, id_: str) -> None:
        batches, batch = self._batches, await self._find(exchange, id_)
        if batch.is_open:
            raise invalid("message_batch_id", "its processing has not ended; ask again when it has")
        if batch.problems and not batch.output_file_id:
            raise invalid("message_batch_id", f"it failed as a whole: {batch.problems[0].message}")
        tenant = exchange.verified_caller.identity.tenant
        file = await batches.call(batches.store.file, tenant, batch.output_file_id)
        await batches.send(exchange, file, "application/x-jsonl")


def _check(requests: Sequence[BatchRequest], max_lines: int) -> None:
    if not 0 < len(requests) <= max_lines:
        problem = f"{len(requests)} requests; a batch has 1 to {max_lines} (gateway.batches.max_lines)"
        raise invalid("requests", problem)
    first: dict[str, int] = {}
    for index, request in enumerate(requests):
        field = f"requests[{index}].custom_id"
        if not 0 < len(request.custom_id) <= MAX_CUSTOM_ID:
            raise invalid(field, f"it has {len(request.custom_id)} characters; use 1 to {MAX_CUSTOM_ID}")
        if bytes(memoryview(request.params)[:1]) != b"{":
            raise invalid(f"requests[{index}].params", "it is no JSON object")
        earlier = first.setdefault(request.custom_id, index)
        if earlier != index:
            problem = f"{request.custom_id!r} is that of requests[{earlier}], too; every one needs its own"
            raise invalid(field, problem)


def _write(upload: Upload, requests: Sequence[BatchRequest]) -> None:
    """The input as a file; what the client has written over several lines becomes one."""
    for start in range(0, len(requests), _WRITTEN_TOGETHER):
        some = requests[start : start + _WRITTEN_TOGETHER]
        lines = [
            _encode({"custom_id": each.custom_id, "url": MESSAGES, "body": _on_one_line(each.params)})
            for each in some
        ]
        upload.write(b"\n".join(lines) + b"\n")


def _on_one_line(params: msgspec.Raw) -> Any:
    # No text of JSON has a line's end in it: those that are there are white space.
    return msgspec.Raw(bytes(params).replace(b"\r", b" ").replace(b"\n", b" "))


def _own(id_: str) -> str:
    return _OWN_PREFIX + id_.removeprefix(_PREFIX) if id_ else ""


@contextmanager
def _named(id_: str) -> Iterator[None]:
    """Refusals that name a batch name it as the client did."""
    try:
        yield
    except MillraceError as error:
        told = error.message.replace(_own(id_), id_)
        field = "message_batch_id" if error.field == "batch_id" else error.field
        raise MillraceError(
            error.reason,
            told.replace("batch_id: ", "message_batch_id: ", 1) if field != error.field else told,
            field=field,
            metadata=error.metadata,
            retry_after_s=error.retry_after_s,
        ) from error


def _object(exchange: Exchange, batch: RequestBatch) -> dict[str, Any]:
    """A batch as the API writes it; `status_detail` is beyond it: what holds the batch up, for people."""
    id_ = _PREFIX + batch.id.removeprefix(_OWN_PREFIX)
    status = "ended"
    if batch.is_open:
        status = "canceling" if batch.cancelling_unix_s else "in_progress"
    return {
        "id": id_,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": batch.num_lines - batch.num_answered if batch.is_open else 0,
            **{name: batch.counts[outcome] for outcome, name in _TYPES.items()},
        },
        "created_at": _moment(batch.created_unix_s),
        "expires_at": _moment(batch.deadline_unix_s),
        "ended_at": _moment(batch.ended_unix_s),
        "cancel_initiated_at": _moment(batch.cancelling_unix_s),
        "archived_at": None,
        "results_url": None if batch.is_open else f"{_origin(exchange)}{BATCHES}/{id_}/results",
        "status_detail": batch.detail or (batch.problems[0].message if batch.problems else None),
    }


def _origin(exchange: Exchange) -> str:
    """As the client has named this server; "" where it has not."""
    host = exchange.header(b"host")
    return f"{exchange.header(b'x-forwarded-proto') or 'http'}://{host}" if host else ""


def _moment(unix_s: int) -> str | None:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if unix_s else None


class AnthropicResults(ResultForm):
    """Results as Anthropic writes them, all in one file."""

    def write(self, batch: RequestBatch, result: LineResult) -> bytes:
        """See ResultForm."""
        told: dict[str, Any] = {"type": _TYPES[result.outcome]}
        if result.outcome is LineOutcome.SUCCEEDED:
            told["message"] = msgspec.Raw(result.body)
        elif result.outcome is LineOutcome.ERRORED:
            told["error"] = msgspec.Raw(result.body) if result.body else _error_body(result)
        return _encode({"custom_id": result.custom_id, "result": told}) + b"\n"

    def is_error(self, result: LineResult) -> bool:
        """See ResultForm."""
        return False

    def purposes(self) -> Sequence[str]:
        """See ResultForm."""
        return _OUTPUT, _OUTPUT


def _error_body(result: LineResult) -> msgspec.Raw:
    error = result.error or MillraceError(Reason.INTERNAL, "an unexpected failure")
    if error.field.startswith(_LINE_BODY):
        # A line of the input calls it otherwise than the client did.
        told, field = (f"params.{each.removeprefix(_LINE_BODY)}" for each in (error.message, error.field))
        error = MillraceError(error.reason, told, field=field)
    return msgspec.Raw(ERRORS.body(error, result.request_id))
