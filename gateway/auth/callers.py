"""Who sends an HTTP request: the context that somebody in front has signed, or the credentials themselves.

Envoy asks about gRPC calls before it sends them on (`authorizer`). An HTTP request it sends at once, with its
credentials: the question would cost the gateway and Envoy more than most of what follows.
"""

from __future__ import annotations

from collections.abc import Mapping

from gateway.auth.authorizer import Authorizer
from gateway.auth.verifier import Arrival, CallerVerifier
from gateway.types.caller import Caller
from runtime.context import CONTEXT_HEADER

_CONTEXT = CONTEXT_HEADER.encode()


class HttpCallers:
    """Identifies callers by their headers; Envoy has dropped what clients may not send."""

    def __init__(self, authorizer: Authorizer, verifier: CallerVerifier) -> None:
        self._authorizer = authorizer
        self._verifier = verifier

    def identify(self, headers: Mapping[bytes, bytes], received_s: float) -> Caller:
        """The caller of a request; names of `headers` are in lower case.

        Raises MISSING_CREDENTIALS, INVALID_CREDENTIALS, TENANT_NOT_ALLOWED, TIER_NOT_ALLOWED and
        CONTEXT_SIGNATURE_INVALID.
        """
        traceparent, tracestate, client_request_id, retries = (
            headers.get(name, b"").decode("latin-1")
            for name in (b"traceparent", b"tracestate", b"x-client-request-id", b"x-stainless-retry-count")
        )
        arrival = Arrival(
            received_s=received_s,
            traceparent=traceparent,
            tracestate=tracestate,
            client_request_id=client_request_id,
            retries=retries,
        )
        signed = headers.get(_CONTEXT)
        if signed is not None:
            return self._verifier.verify(signed.decode("latin-1"), arrival)
        return self._verifier.caller(self._authorizer.authenticate(headers), arrival)

    def is_counted(self, caller: Caller) -> bool:
        """Whether a limit of requests per minute applies that nobody has counted this request against."""
        return caller.context is None and self._authorizer.is_counted(
            caller.identity.tenant, caller.identity.key_id
        )
