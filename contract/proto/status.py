"""Domain errors on the wire: google.rpc.Status for RPCs, ErrorDetail inside streams, both ways."""

from __future__ import annotations

from typing import cast

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status
from millrace.common.v1 import error_pb2

from contract.errors import ERROR_DOMAIN, MillraceError, Reason, RequestFailure


def to_status(error: MillraceError) -> status_pb2.Status:
    """A status with ErrorInfo, BadRequest when a field is at fault, RetryInfo when a retry may help."""
    code: int = error.mapping.grpc_code.value[0]
    status = status_pb2.Status(code=code, message=error.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN, metadata=error.metadata)
    )
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def from_status(status: status_pb2.Status) -> MillraceError:
    """Inverse of to_status. A status without our ErrorInfo becomes INTERNAL, or DEADLINE and CANCELLED."""
    reason = _REASON_OF_CODE.get(status.code, Reason.INTERNAL)
    metadata: dict[str, str] = {}
    field = ""
    retry_after_s: float | None = None
    for packed in status.details:
        info = error_details_pb2.ErrorInfo()
        bad = error_details_pb2.BadRequest()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(info) and info.domain == ERROR_DOMAIN and info.reason in Reason.__members__:
            reason = Reason[info.reason]
            metadata = dict(info.metadata)
        elif packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return MillraceError(reason, status.message, field=field, metadata=metadata, retry_after_s=retry_after_s)


def from_rpc_error(error: grpc.RpcError, *, unavailable: Reason = Reason.INTERNAL) -> MillraceError:
    """The domain error behind a failed call; `unavailable` names the peer that could not be reached."""
    status = rpc_status.from_call(cast(grpc.Call, error))
    if status is not None:
        return from_status(status)
    return from_code(error.code(), error.details() or "", unavailable=unavailable)


def from_code(code: grpc.StatusCode, details: str, *, unavailable: Reason = Reason.INTERNAL) -> MillraceError:
    """The domain error of a call that ended with a bare status."""
    details = details or code.name
    if code == grpc.StatusCode.UNAVAILABLE:
        return MillraceError(unavailable, details, retry_after_s=1.0)
    return MillraceError(_REASON_OF_CODE.get(code.value[0], Reason.INTERNAL), details)


def to_detail(error: MillraceError | RequestFailure) -> error_pb2.ErrorDetail:
    """The form that travels inside a long-lived stream."""
    return error_pb2.ErrorDetail(
        reason=str(error.reason),
        message=error.message,
        field=error.field,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def from_detail(detail: error_pb2.ErrorDetail) -> MillraceError:
    """Inverse of to_detail; an unknown reason becomes INTERNAL."""
    known = detail.reason in Reason.__members__
    return MillraceError(
        Reason[detail.reason] if known else Reason.INTERNAL,
        detail.message,
        field=detail.field,
        metadata=dict(detail.metadata),
        retry_after_s=detail.retry_after_s if detail.HasField("retry_after_s") else None,
    )


_REASON_OF_CODE = {
    code_pb2.CANCELLED: Reason.CANCELLED,
    code_pb2.DEADLINE_EXCEEDED: Reason.DEADLINE_EXCEEDED,
    code_pb2.INVALID_ARGUMENT: Reason.INVALID_ARGUMENT,
    code_pb2.UNIMPLEMENTED: Reason.ROUTE_NOT_FOUND,
}
