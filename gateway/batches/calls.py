"""A line's request: the endpoint's own handler answers it, as an exchange that has no connection.

So a line is read, judged, limited, paid for, traced and answered as the same request over HTTP is, and its
answer is the same bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from contract.errors import MillraceError, Reason
from gateway.auth.verifier import Arrival, CallerVerifier
from gateway.batches.types import RequestBatch
from gateway.http.errors import unexpected
from gateway.http.exchange import Exchange, Handler
from gateway.intake.intake import LARGE_BYTES, Intake
from gateway.types.error_form import ErrorForm
from gateway.types.request import Caller, Identity

_log = logging.getLogger(__name__)


class _Used(msgspec.Struct):
    usage: Any = None


_usage = msgspec.json.Decoder(_Used)


class LineAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler answered; `error` is what it raised instead."""

    request_id: str
    status: int
    body: bytes
    error: MillraceError | None = None


def request_id(batch_id: str, line: int) -> str:
    """The id of a line's request, the same whoever computes it: ids in its answer derive from it."""
    return hashlib.blake2b(f"{batch_id}/{line}".encode(), digest_size=16).hexdigest()


def caller_of(verifier: CallerVerifier, identity: Identity, batch_id: str, line: int) -> Caller:
    """Who asks for a line: whoever created the batch, behind everybody else, until nobody is left."""
    identity = replace(
        identity, request_id=request_id(batch_id, line), deadline_unix_ms=None, in_batch=True, traceparent=""
    )
    caller = verifier.caller(identity, Arrival(received_s=time.monotonic()))
    return replace(caller, client_request_id=batch_id, entry_ids=_entry_ids(batch_id, line))


def _entry_ids(batch_id: str, line: int) -> Iterator[str]:
    """Ids of the ledger's rows of a line, which has several where it has several prompts."""
    number = 0
    while True:
        yield hashlib.blake2b(f"ledger/{batch_id}/{line}/{number}".encode(), digest_size=16).hexdigest()
        number += 1


async def answered(
    handler: Handler, path: str, body: bytes, caller: Caller, form: ErrorForm, intake: Intake
) -> LineAnswer:
    """Has a handler answer a request to `path`; a large one holds its bytes as one over HTTP does."""
    connection = _NoConnection(body)
    scope = {"method": "POST", "path": path, "headers": []}
    exchange = Exchange(scope, connection.receive, connection.send, len(body), form)
    exchange.caller = caller
    id_ = caller.identity.request_id
    try:
        with intake.lease(caller.identity.tenant) as hold:
            await exchange.read_body(hold if len(body) > LARGE_BYTES else None)
            await handler(exchange)
    except MillraceError as error:
        return _refused(form, error, id_)
    except Exception:
        _log.exception("unexpected failure at %s, request %s of a batch", path, id_)
        return _refused(form, unexpected(), id_)
    finally:
        connection.over.set()
    return LineAnswer(request_id=id_, status=connection.status, body=b"".join(connection.pieces))


def _refused(form: ErrorForm, error: MillraceError, id_: str) -> LineAnswer:
    return LineAnswer(request_id=id_, status=form.status(error), body=form.body(error, id_), error=error)


def cancelled_error() -> MillraceError:
    """Of a line that a cancelled batch has not begun."""
    return MillraceError(Reason.CANCELLED, "the batch was cancelled before this line was answered")


def expired_error(batch: RequestBatch) -> MillraceError:
    """Of a line whose batch has run out of time."""
    return MillraceError(
        Reason.DEADLINE_EXCEEDED,
        f"the completion_window of {batch.completion_window} ended before this line was answered; send it "
        "again",
    )


def tokens_of(body: bytes) -> float:
    """What a line took by its answer's own words, of whichever API; at least 1."""
    try:
        usage = _usage.decode(body).usage
    except msgspec.MsgspecError:
        return 1.0
    if not isinstance(usage, dict):
        return 1.0
    total = usage.get("total_tokens")
    if not isinstance(total, int):
        counts = [each for name, each in usage.items() if name.endswith("_tokens")]
        total = sum(each for each in counts if isinstance(each, int))
    return float(max(1, total))


class _NoConnection:
    """Both ends of an exchange's wire: the body goes in, the answer stays here."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.over = asyncio.Event()
        self.status = 0
        self.pieces: list[bytes] = []

    async def receive(self) -> dict[str, Any]:
        """See ASGI: the request, then silence until its end."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        """See ASGI."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.pieces.append(message["body"])
