"""Signs the request context at the edge and verifies it at every service behind it."""

from __future__ import annotations

import base64
import binascii
import hmac

from google.protobuf.message import DecodeError
from millrace.common.v1 import context_pb2

from contract.errors import MillraceError, Reason

# Header in which Envoy hands the signed context from ext_authz to the gateway. Client copies are stripped.
CONTEXT_HEADER = "x-millrace-context"
# Contexts may be this much ahead of the verifier's clock, in milliseconds.
MAX_CLOCK_SKEW_MS = 60_000


def sign(context: context_pb2.RequestContext, secret: bytes) -> context_pb2.SignedContext:
    """Serializes and signs `context`."""
    payload = context.SerializeToString(deterministic=True)
    return context_pb2.SignedContext(payload=payload, signature=_signature(payload, secret))


def verify(
    signed: context_pb2.SignedContext, secret: bytes, *, now_unix_ms: int, max_age_s: float
) -> context_pb2.RequestContext:
    """The context, if the signature holds and it is fresh; raises CONTEXT_SIGNATURE_INVALID otherwise."""
    if not hmac.compare_digest(signed.signature, _signature(signed.payload, secret)):
        raise _invalid("the request context's signature does not match this deployment's secret")
    try:
        context = context_pb2.RequestContext.FromString(signed.payload)
    except DecodeError as error:
        raise _invalid("the request context cannot be decoded") from error
    age_ms = now_unix_ms - context.issued_unix_ms
    if not -MAX_CLOCK_SKEW_MS <= age_ms <= max_age_s * 1000:
        raise _invalid(f"the request context is {age_ms / 1000:.0f} s old; the limit is {max_age_s:.0f} s")
    return context


def to_header(signed: context_pb2.SignedContext) -> str:
    """Text form for the x-millrace-context header."""
    return base64.urlsafe_b64encode(signed.SerializeToString()).decode()


def from_header(text: str) -> context_pb2.SignedContext:
    """Inverse of to_header; raises CONTEXT_SIGNATURE_INVALID for anything else."""
    try:
        return context_pb2.SignedContext.FromString(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError, DecodeError) as error:
        raise _invalid(f"the {CONTEXT_HEADER} header cannot be decoded") from error


def _signature(payload: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, payload, "sha256")


def _invalid(message: str) -> MillraceError:
    return MillraceError(
        Reason.CONTEXT_SIGNATURE_INVALID,
        f"{message}; send requests through the gateway's edge, which signs them",
    )
