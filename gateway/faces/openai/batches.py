"""Handlers of /v1/batches, and how results of their lines are written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from contract.errors import invalid
from gateway.batches.service import Batches
from gateway.batches.types import BatchStatus, LineOutcome, LineResult, RequestBatch, ResultForm
from gateway.faces.bodies import read
from gateway.faces.openai.files import BATCH, BATCH_OUTPUT, check_kept, listing, visible_file
from gateway.faces.queries import Query, dispatch
from gateway.http.exchange import Exchange
from gateway.intake.intake import Intake
from gateway.pipeline.validate import check_metadata

BATCHES = "/v1/batches"
API = "openai"
_encode = msgspec.json.Encoder().encode


class OutputExpiry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: int


class BatchBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: OutputExpiry | None = None


_DECODER = msgspec.json.Decoder(BatchBody)
# The API's own words for lines that nobody began.
_CODES = {LineOutcome.CANCELLED: "batch_cancelled", LineOutcome.EXPIRED: "batch_expired"}


class BatchEndpoints:
    """The handlers. `intake` raises what to answer while there is none yet."""

    def __init__(self, batches: Batches, intake: Callable[[], Intake]) -> None:
        self._batches = batches
        self._intake = intake

    async def create(self, exchange: Exchange) -> None:
        """POST /v1/batches."""
        batches, identity = self._batches, exchange.verified_caller.identity
        body, _ = await read(exchange, self._intake(), _DECODER, _check)
        file = await visible_file(batches, identity.tenant, body.input_file_id, "input_file_id")
        if file.purpose != BATCH:
            raise invalid("input_file_id", f"its purpose is {file.purpose}; upload one with purpose {BATCH}")
        batch = batches.new(
            identity,
            api=API,
            endpoint=body.endpoint,
            file=file,
            window=body.completion_window,
            metadata=body.metadata or {},
        )
        if body.output_expires_after is not None:
            batch.output_kept_s = body.output_expires_after.seconds
        await batches.create(identity, batch)
        await exchange.respond(200, _encode(batch_object(batch)))

    async def list(self, exchange: Exchange) -> None:
        """GET /v1/batches."""
        query = Query(exchange, ("limit", "after"))
        tenant = exchange.verified_caller.identity.tenant
        found, more = await self._batches.page(tenant, API, **query.page())
        await exchange.respond(200, _encode(listing([batch_object(each) for each in found], more)))

    async def handle(self, exchange: Exchange) -> None:
        """Any method, for any path below /v1/batches/."""
        id_, _, part = exchange.path.removeprefix(f"{BATCHES}/").partition("/")
        handlers = {"": {"GET": self._get}, "cancel": {"POST": self._cancel}}
        await dispatch(exchange, handlers.get(part), id_)

    async def _get(self, exchange: Exchange, id_: str) -> None:
        Query(exchange, ())
        batch = await self._batches.get(exchange.verified_caller.identity.tenant, API, id_)
        await exchange.respond(200, _encode(batch_object(batch)))

    async def _cancel(self, exchange: Exchange, id_: str) -> None:
        Query(exchange, ())
        batch = await self._batches.cancel(exchange.verified_caller.identity.tenant, API, id_)
        await exchange.respond(200, _encode(batch_object(batch)))


def _check(body: BatchBody) -> None:
    check_metadata(body.metadata or {})
    if body.output_expires_after is not None:
        check_kept("output_expires_after.seconds", body.output_expires_after.seconds)


def batch_object(batch: RequestBatch) -> dict[str, Any]:
    """A batch as the API writes it; `status_detail` is beyond it: what holds the batch up, for people."""
    ended = batch.ended_unix_s
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": [*map(_problem, batch.problems)]} if batch.problems else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_unix_s,
        "in_progress_at": batch.in_progress_unix_s or None,
        "expires_at": batch.deadline_unix_s,
        "finalizing_at": batch.finalizing_unix_s or None,
        "cancelling_at": batch.cancelling_unix_s or None,
        **{
            f"{status}_at": ended if ended and batch.status is status else None
            for status in (
                BatchStatus.COMPLETED,
                BatchStatus.FAILED,
                BatchStatus.EXPIRED,
                BatchStatus.CANCELLED,
            )
        },
        "request_counts": {
            "total": batch.num_lines,
            "completed": batch.counts[LineOutcome.SUCCEEDED],
            "failed": batch.counts[LineOutcome.ERRORED],
        },
        "metadata": batch.metadata or None,
        "status_detail": batch.detail or None,
    }


def _problem(problem: Any) -> dict[str, Any]:
    return {
        "code": problem.code,
        "message": problem.message,
        "param": problem.param or None,
        "line": problem.line or None,
    }


class OpenAiResults(ResultForm):
    """Results as OpenAI writes them: answers in one file, everything else in another."""

    def write(self, batch: RequestBatch, result: LineResult) -> bytes:
        """See ResultForm."""
        name = hashlib.blake2b(f"{batch.id}/{result.line}".encode(), digest_size=12).hexdigest()
        response = None
        if result.body:
            response = {
                "status_code": result.status,
                "request_id": result.request_id,
                "body": msgspec.Raw(result.body),
            }
        told: Mapping[str, Any] | None = None
        if result.error is not None:
            told = {
                "code": _CODES.get(result.outcome, result.error.reason.openai_code),
                "message": result.error.message,
                "param": result.error.field or None,
                "line": result.line,
            }
        written = {
            "id": f"batch_req_{name}",
            "custom_id": result.custom_id,
            "response": response,
            "error": told,
        }
        return _encode(written) + b"\n"

    def is_error(self, result: LineResult) -> bool:
        """See ResultForm."""
        return result.outcome is not LineOutcome.SUCCEEDED

    def purposes(self) -> Sequence[str]:
        """See ResultForm."""
        return BATCH_OUTPUT, BATCH_OUTPUT
