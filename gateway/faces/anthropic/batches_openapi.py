"""What the OpenAPI document of Anthropic's message batches says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from contract.errors import MillraceError
from gateway.batches.lines import MAX_CUSTOM_ID
from gateway.faces.anthropic.batches import BATCHES, BatchRequest, MessageBatchBody
from gateway.faces.anthropic.errors import ERRORS, ApiErrorBody
from gateway.faces.anthropic.pages import MAX_PAGE
from gateway.faces.schemas import (
    STORED_REASONS,
    TEXT,
    answer_schemas,
    by_status,
    framed,
    or_null,
    ref,
    text,
    told,
)

PATH = f"{BATCHES}/openapi.json"
_ABOUT = """Message batches. Each of `requests` is answered as its `params` are by `/v1/messages`, in
what capacity is left; `results` are JSON lines `{"custom_id", "result": {"type", "message" | "error"}}`. What
`params` may be is told by the result. `status_detail` of a batch says what holds it up.
"""
_COUNTS = ("processing", "succeeded", "errored", "canceled", "expired")


def _whole(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


_MOMENT = or_null(TEXT)
_BATCH = _whole(
    id=TEXT,
    type={"const": "message_batch"},
    processing_status={"enum": ["in_progress", "canceling", "ended"]},
    request_counts=_whole(**{name: {"type": "integer", "minimum": 0} for name in _COUNTS}),
    created_at=TEXT,
    expires_at=TEXT,
    ended_at=_MOMENT,
    cancel_initiated_at=_MOMENT,
    archived_at={"type": "null"},
    results_url=_MOMENT,
    status_detail=_MOMENT,
)
_PAGE = _whole(data={"type": "array", "items": _BATCH}, has_more={"type": "boolean"})
_GONE = _whole(id=TEXT, type={"const": "message_batch_deleted"})
_QUERY = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    "before_id": TEXT,
    "after_id": TEXT,
}
_ONE = f"{BATCHES}/{{message_batch_id}}"
# By path and method: name, summary, parameters of the query, schema of the answer.
_OPERATIONS: Mapping[tuple[str, str], tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    (BATCHES, "post"): ("createMessageBatch", "Run many requests", {}, _BATCH),
    (BATCHES, "get"): ("listMessageBatches", "List batches", _QUERY, _PAGE),
    (_ONE, "get"): ("retrieveMessageBatch", "Describe a batch", {}, _BATCH),
    (_ONE, "delete"): ("deleteMessageBatch", "Delete a batch that has ended", {}, _GONE),
    (f"{_ONE}/cancel", "post"): ("cancelMessageBatch", "End a batch", {}, _BATCH),
    (f"{_ONE}/results", "get"): ("retrieveMessageBatchResults", "The results of a batch", {}, {}),
    (PATH, "get"): ("describeMessageBatches", "Show this document", {}, {"type": "object"}),
}


@cache
def document() -> bytes:
    """The document as JSON."""
    schemas = answer_schemas((MessageBatchBody, ApiErrorBody))
    schemas[BatchRequest.__name__]["properties"] = {
        "custom_id": text(MAX_CUSTOM_ID, 1),
        "params": {"type": "object"},
    }
    schemas[MessageBatchBody.__name__]["properties"]["requests"]["minItems"] = 1
    return framed(
        "Millrace: message batches",
        _ABOUT,
        paths=_paths(),
        components={"schemas": schemas},
        beyond_reasons={},
        beyond={r"requests\[\d+\]\.custom_id": "it is there once", "before_id": "after_id is not given, too"},
    )


def _paths() -> dict[str, dict[str, Any]]:
    content = {"application/json": {"schema": ref(ApiErrorBody)}}
    statuses = by_status(STORED_REASONS, lambda reason: ERRORS.status(MillraceError(reason, "")))
    refusals = {
        status: {"description": told(reasons), "content": content} for status, reasons in statuses.items()
    }
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (name, summary, query, schema) in _OPERATIONS.items():
        given = [{"name": each, "in": "query", "schema": kind} for each, kind in query.items()]
        if path.startswith(_ONE):
            given.append({"name": "message_batch_id", "in": "path", "required": True, "schema": TEXT})
        kind = "application/json" if schema else "application/x-jsonl"
        answer = {"description": "The answer.", "content": {kind: {"schema": schema}}}
        responses = {"200": answer, **refusals}
        operation = {"operationId": name, "summary": summary, "parameters": given, "responses": responses}
        if name == "createMessageBatch":
            body = {"application/json": {"schema": ref(MessageBatchBody)}}
            operation["requestBody"] = {"required": True, "content": body}
        paths.setdefault(path, {})[method] = operation
    return paths
