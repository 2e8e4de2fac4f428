"""The OpenAPI document of account, usage and status."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from contract.errors import Reason
from gateway.faces.schemas import answer_schemas, by_status, framed, ref, told
from gateway.ui import answer_types as answers
from gateway.ui.endpoints import ACCOUNT, GROUPS, STATUS, USAGE

PATH = "/v1/account/openapi.json"
_REASONS = (
    Reason.UNSUPPORTED_FIELD,
    Reason.INVALID_ARGUMENT,
    Reason.MISSING_CREDENTIALS,
    Reason.INVALID_CREDENTIALS,
    Reason.TENANT_NOT_ALLOWED,
    Reason.REQUEST_RATE_EXCEEDED,
    Reason.STORE_UNAVAILABLE,
    Reason.TOKENIZER_UNAVAILABLE,
    Reason.INTERNAL,
)
_ABOUT = """What the page at /ui asks beside the APIs: whose key it is, what its tenant has used, what runs.
A parameter that is not listed is refused by name."""
_PARAMETERS: list[dict[str, Any]] = [
    {
        "name": "by",
        "in": "query",
        "description": "What sums are grouped by; the day where it is left out.",
        "schema": {"enum": list(GROUPS)},
        "example": "day",
    },
    {
        "name": "since",
        "in": "query",
        "description": "First second, since the Unix epoch; this month's first (UTC) where it is left out.",
        "schema": {"type": "integer", "minimum": 0, "maximum": 2**32},
        "example": 1764547200,
    },
]


@cache
def document() -> bytes:
    """The document as JSON."""
    show = _operation
    paths = {
        ACCOUNT: {"get": show("showAccount", "Whose key it is, and what it may do", answers.Account)},
        USAGE: {
            "get": show("showUsage", "What the key's tenant has used", answers.UsageTable)
            | {"parameters": _PARAMETERS}
        },
        STATUS: {"get": show("showStatus", "What runs, for operators", answers.DeploymentStatus)},
        PATH: {"get": {**show("describeAccount", "Show this document"), "security": []}},
    }
    return framed(
        "Millrace: Account",
        _ABOUT,
        paths=paths,
        components={"schemas": answer_schemas(answers.ANSWERS)},
        beyond_reasons={},
        beyond={},
    )


def _operation(name: str, summary: str, answer: type[msgspec.Struct] | None = None) -> dict[str, Any]:
    schema = {"type": "object"} if answer is None else ref(answer)
    answered = {"description": "The answer.", "content": {"application/json": {"schema": schema}}}
    content = {"application/json": {"schema": ref(answers.AccountError)}}
    statuses = by_status(_REASONS, lambda reason: reason.mapping.http_status)
    refusals = {
        status: {"description": told(reasons), "content": content} for status, reasons in statuses.items()
    }
    return {"operationId": name, "summary": summary, "responses": {"200": answered, **refusals}}
