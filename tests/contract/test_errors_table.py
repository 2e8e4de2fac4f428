"""The one error table, in both directions and on both faces."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from millrace.common.v1 import error_pb2

from contract.errors import ERROR_DOMAIN, MillraceError, Reason
from contract.proto.status import from_detail, from_status, to_detail, to_status

# The public promise: clients switch on these. A change here breaks somebody.
PROMISED = {
    "INVALID_ARGUMENT": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "MALFORMED_BODY": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "UNSUPPORTED_FIELD": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "REQUEST_TOO_LARGE": ("RESOURCE_EXHAUSTED", 413, "invalid_request_error"),
    "TEMPLATE_FAILED": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "GRAMMAR_REFUSED": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "CONTEXT_LENGTH_EXCEEDED": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "NEVER_FITS": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "MISSING_CREDENTIALS": ("UNAUTHENTICATED", 401, "authentication_error"),
    "INVALID_CREDENTIALS": ("UNAUTHENTICATED", 401, "authentication_error"),
    "CONTEXT_SIGNATURE_INVALID": ("UNAUTHENTICATED", 401, "authentication_error"),
    "MODEL_NOT_ALLOWED": ("PERMISSION_DENIED", 403, "permission_error"),
    "TIER_NOT_ALLOWED": ("PERMISSION_DENIED", 403, "permission_error"),
    "MODEL_NOT_FOUND": ("NOT_FOUND", 404, "invalid_request_error"),
    "ROUTE_NOT_FOUND": ("UNIMPLEMENTED", 404, "invalid_request_error"),
    "METHOD_NOT_ALLOWED": ("UNIMPLEMENTED", 405, "invalid_request_error"),
    "REQUEST_RATE_EXCEEDED": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    "TOKEN_RATE_EXCEEDED": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    "CONCURRENCY_EXCEEDED": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    "QUEUE_LIMIT_EXCEEDED": ("RESOURCE_EXHAUSTED", 429, "rate_limit_error"),
    "BUDGET_EXHAUSTED": ("RESOURCE_EXHAUSTED", 429, "insufficient_quota"),
    "DEADLINE_EXCEEDED": ("DEADLINE_EXCEEDED", 504, "timeout_error"),
    "CANCELLED": ("CANCELLED", 499, "cancelled_error"),
    "VOCABULARY_MISMATCH": ("FAILED_PRECONDITION", 503, "service_unavailable_error"),
    "DRAINING": ("UNAVAILABLE", 503, "service_unavailable_error"),
    "GATEWAY_FULL": ("UNAVAILABLE", 503, "service_unavailable_error"),
    "ENGINE_UNAVAILABLE": ("UNAVAILABLE", 503, "service_unavailable_error"),
    "ENGINE_LOST": ("UNAVAILABLE", 503, "service_unavailable_error"),
    "TOKENIZER_UNAVAILABLE": ("UNAVAILABLE", 503, "service_unavailable_error"),
    "POISONED_REQUEST": ("INVALID_ARGUMENT", 400, "invalid_request_error"),
    "STEP_FAILED": ("INTERNAL", 500, "server_error"),
    "INTERNAL": ("INTERNAL", 500, "server_error"),
}

# `code` over HTTP where OpenAI has a word; elsewhere the reason in lower case.
OPENAI_CODES = {
    "INVALID_ARGUMENT": "invalid_value",
    "UNSUPPORTED_FIELD": "unsupported_parameter",
    "CONTEXT_LENGTH_EXCEEDED": "context_length_exceeded",
    "NEVER_FITS": "context_length_exceeded",
    "MISSING_CREDENTIALS": "invalid_api_key",
    "INVALID_CREDENTIALS": "invalid_api_key",
    "MODEL_NOT_FOUND": "model_not_found",
    "MODEL_NOT_ALLOWED": "model_not_found",
    "REQUEST_RATE_EXCEEDED": "rate_limit_exceeded",
    "TOKEN_RATE_EXCEEDED": "rate_limit_exceeded",
    "CONCURRENCY_EXCEEDED": "rate_limit_exceeded",
    "QUEUE_LIMIT_EXCEEDED": "rate_limit_exceeded",
    "BUDGET_EXHAUSTED": "insufficient_quota",
    "STEP_FAILED": "server_error",
    "INTERNAL": "server_error",
}

# Families of gRPC codes and the HTTP classes that go with them.
HTTP_OF_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: {400, 413, 422},
    grpc.StatusCode.UNAUTHENTICATED: {401},
    grpc.StatusCode.PERMISSION_DENIED: {403},
    grpc.StatusCode.NOT_FOUND: {404},
    grpc.StatusCode.UNIMPLEMENTED: {404, 405, 501},
    grpc.StatusCode.RESOURCE_EXHAUSTED: {413, 429},
    grpc.StatusCode.DEADLINE_EXCEEDED: {504},
    grpc.StatusCode.CANCELLED: {499},
    grpc.StatusCode.FAILED_PRECONDITION: {412, 503},
    grpc.StatusCode.UNAVAILABLE: {503},
    grpc.StatusCode.INTERNAL: {500},
}


@pytest.mark.parametrize("name", PROMISED)
def test_promised_reasons_keep_their_meaning(name: str) -> None:
    mapping = Reason(name).mapping
    assert (mapping.grpc_code.name, mapping.http_status, mapping.openai_type) == PROMISED[name]


@pytest.mark.parametrize("reason", Reason)
def test_codes_are_openais_words(reason: Reason) -> None:
    assert reason.openai_code == OPENAI_CODES.get(reason.value, reason.value.lower())


def test_the_reference_says_both_names_of_every_reason() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference.md").read_text()
    for reason in Reason:
        mapping = reason.mapping
        names = f"| `{reason.value}` | `{reason.openai_code}` "
        assert f"{names}| {mapping.http_status} | `{mapping.grpc_code.name}` |" in text, names


@pytest.mark.parametrize("reason", Reason)
def test_the_two_faces_agree(reason: Reason) -> None:
    mapping = reason.mapping
    assert mapping.http_status in HTTP_OF_CODE[mapping.grpc_code]
    assert re.fullmatch(r"[a-z_]+", mapping.openai_type)
    assert reason.value == reason.name


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("retry_after_s", [None, 0.25, 12.0])
def test_status_round_trip(reason: Reason, retry_after_s: float | None) -> None:
    error = MillraceError(
        reason,
        "5000 tokens; the limit is 4096; shorten the prompt",
        field="messages[2].content",
        metadata={"limit": "4096"},
        retry_after_s=retry_after_s,
    )
    status = to_status(error)
    assert status.code == reason.mapping.grpc_code.value[0]
    # Over the wire, as a client sees it.
    _assert_equal(from_status(status_pb2.Status.FromString(status.SerializeToString())), error)


@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("retry_after_s", [None, 0.0, 3.5])
def test_stream_detail_round_trip(reason: Reason, retry_after_s: float | None) -> None:
    error = MillraceError(reason, "no", field="", metadata={"a": "b"}, retry_after_s=retry_after_s)
    detail = error_pb2.ErrorDetail.FromString(to_detail(error).SerializeToString())
    _assert_equal(from_detail(detail), error)


def test_status_is_what_other_clients_of_google_rpc_expect() -> None:
    status = to_status(
        MillraceError(Reason.TOKEN_RATE_EXCEEDED, "slow down", field="max_tokens", retry_after_s=1.5)
    )
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    assert [packed.Unpack(into) for packed, into in zip(status.details, (info, bad, retry), strict=True)]
    assert (info.domain, info.reason) == (ERROR_DOMAIN, "TOKEN_RATE_EXCEEDED")
    assert bad.field_violations[0].field == "max_tokens"
    assert retry.retry_delay == Duration(seconds=1, nanos=500_000_000)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (code_pb2.CANCELLED, Reason.CANCELLED),
        (code_pb2.DEADLINE_EXCEEDED, Reason.DEADLINE_EXCEEDED),
        (code_pb2.INVALID_ARGUMENT, Reason.INVALID_ARGUMENT),
        (code_pb2.UNKNOWN, Reason.INTERNAL),
    ],
)
def test_foreign_statuses_become_domain_errors(code: int, reason: Reason) -> None:
    assert from_status(status_pb2.Status(code=code, message="elsewhere")).reason is reason


def test_reason_of_a_newer_peer_is_not_lost_but_internal() -> None:
    assert from_detail(error_pb2.ErrorDetail(reason="NOT_INVENTED_YET")).reason is Reason.INTERNAL


def _assert_equal(one: MillraceError, other: MillraceError) -> None:
    for name in ("reason", "message", "field", "metadata", "retry_after_s"):
        assert getattr(one, name) == getattr(other, name), name
