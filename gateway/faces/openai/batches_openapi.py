"""What the OpenAPI document of files and batches says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from contract.errors import Reason
from gateway.batches.service import MAX_KEPT_S, MIN_KEPT_S
from gateway.batches.types import BatchStatus
from gateway.faces.openai.batches import BATCHES, BatchBody
from gateway.faces.openai.files import FILES, MAX_PAGE, PURPOSES
from gateway.faces.queries import MAX_LIMIT
from gateway.faces.schemas import STORED_REASONS, TEXT, answer_schemas, by_status, framed, or_null, ref, told
from gateway.pipeline.validate import MAX_METADATA_KEY, MAX_METADATA_VALUE
from gateway.types.request import MAX_METADATA

PATH = "/v1/batches/openapi.json"
_ABOUT = """OpenAI's files and batches. A batch is a file of JSON lines
`{"custom_id", "method": "POST", "url", "body"}`; its lines are answered as the same requests to `url` are, in
what capacity is left, and its results are files of lines
`{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}`. A line that is no
request, or is refused, becomes a line of the error file. `status_detail` of a batch says what holds it up.
"""
_NATURAL = {"type": "integer", "minimum": 0}
_MOMENT, _ID = or_null(_NATURAL), or_null(TEXT)
_KEPT = {"type": "integer", "minimum": MIN_KEPT_S, "maximum": MAX_KEPT_S}
_FILE = {
    "id": TEXT,
    "object": {"const": "file"},
    "bytes": _NATURAL,
    "created_at": _NATURAL,
    "expires_at": _MOMENT,
    "filename": TEXT,
    "purpose": {"enum": [*PURPOSES]},
    "status": {"const": "processed"},
    "status_details": _ID,
}
_PROBLEM = {"code": TEXT, "message": TEXT, "param": _ID, "line": or_null(_NATURAL)}
_MOMENTS = ("in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled")
_METADATA = {
    "type": "object",
    "additionalProperties": {"type": "string", "maxLength": MAX_METADATA_VALUE},
    "propertyNames": {"maxLength": MAX_METADATA_KEY},
    "maxProperties": MAX_METADATA,
}


def _whole(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}


_BATCH = {
    "id": TEXT,
    "object": {"const": "batch"},
    "endpoint": TEXT,
    "errors": or_null(
        _whole({"object": {"const": "list"}, "data": {"type": "array", "items": _whole(_PROBLEM)}})
    ),
    "input_file_id": TEXT,
    "completion_window": TEXT,
    "status": {"enum": [*BatchStatus]},
    "output_file_id": _ID,
    "error_file_id": _ID,
    "created_at": _NATURAL,
    "expires_at": _NATURAL,
    **{f"{name}_at": _MOMENT for name in _MOMENTS},
    "request_counts": _whole(dict.fromkeys(("total", "completed", "failed"), _NATURAL)),
    "metadata": or_null(_METADATA),
    "status_detail": _ID,
}
_GONE = _whole({"id": TEXT, "object": {"const": "file"}, "deleted": {"const": True}})
_FORM = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"const": PURPOSES[0]},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _KEPT,
    },
    "required": ["file", "purpose"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}
_AFTER = {"after": TEXT}
_ORDER = {"order": {"enum": ["asc", "desc"]}}
_PAGE = {"limit": {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, **_AFTER}
_FILES = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
    **_AFTER,
    **_ORDER,
    "purpose": TEXT,
}
_ONE_FILE, _ONE = f"{FILES}/{{file_id}}", f"{BATCHES}/{{batch_id}}"
# By path and method: name, summary, parameters of the query, schema of the answer.
_OPERATIONS: Mapping[tuple[str, str], tuple[str, str, Mapping[str, Any], Mapping[str, Any]]] = {
    (FILES, "post"): ("createFile", "Upload a file", {}, _whole(_FILE)),
    (FILES, "get"): ("listFiles", "List files", _FILES, {"type": "object"}),
    (_ONE_FILE, "get"): ("retrieveFile", "Describe a file", {}, _whole(_FILE)),
    (_ONE_FILE, "delete"): ("deleteFile", "Delete a file", {}, _GONE),
    (f"{_ONE_FILE}/content", "get"): ("downloadFile", "The bytes of a file", {}, {}),
    (BATCHES, "post"): ("createBatch", "Run the lines of a file", {}, _whole(_BATCH)),
    (BATCHES, "get"): ("listBatches", "List batches", _PAGE, {"type": "object"}),
    (_ONE, "get"): ("retrieveBatch", "Describe a batch", {}, _whole(_BATCH)),
    (f"{_ONE}/cancel", "post"): ("cancelBatch", "End a batch", {}, _whole(_BATCH)),
    (PATH, "get"): ("describeBatches", "Show this document", {}, {"type": "object"}),
}


@cache
def document() -> bytes:
    """The document as JSON."""
    schemas = answer_schemas((BatchBody,))
    body = schemas[BatchBody.__name__]
    body["required"] = ["input_file_id", "endpoint", "completion_window"]
    body["properties"]["metadata"] = or_null(_METADATA)
    schemas["OutputExpiry"]["properties"]["seconds"] = _KEPT
    return framed(
        "Millrace: files and batches",
        _ABOUT,
        paths=_paths(),
        components={"schemas": schemas},
        beyond_reasons={Reason.STORED_NOT_FOUND: "what is named is kept, and the caller's"},
        beyond={"endpoint": "it is one that is served", "completion_window": "it is 1m to 30d, such as 24h"},
    )


def _paths() -> dict[str, dict[str, Any]]:
    statuses = by_status(STORED_REASONS, lambda reason: reason.mapping.http_status)
    refusals = {status: {"description": told(reasons)} for status, reasons in statuses.items()}
    bodies = {
        "createFile": {"multipart/form-data": {"schema": _FORM}},
        "createBatch": {"application/json": {"schema": ref(BatchBody)}},
    }
    paths: dict[str, dict[str, Any]] = {}
    for (path, method), (name, summary, query, schema) in _OPERATIONS.items():
        named = [each.partition("}")[0] for each in path.split("{")[1:]]
        given = [{"name": each, "in": "path", "required": True, "schema": TEXT} for each in named]
        given += [{"name": each, "in": "query", "schema": kind} for each, kind in query.items()]
        content = {"application/json" if schema else "application/octet-stream": {"schema": schema}}
        answer = {"200": {"description": "The answer.", "content": content}, **refusals}
        operation = {"operationId": name, "summary": summary, "parameters": given, "responses": answer}
        if name in bodies:
            operation["requestBody"] = {"required": True, "content": bodies[name]}
        paths.setdefault(path, {})[method] = operation
    return paths
