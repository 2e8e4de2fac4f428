"""Credentials to a request context, before anything else is spent: Envoy's external authorization of gRPC
calls, and the HTTP face's own.

Envoy asks over HTTP (`ext_authz` with `http_service`): it sends the client's headers that matter to a path
below AUTHORIZE_PREFIX, adds the headers of a 200 to the request and passes everything else to the client.
"""

from __future__ import annotations

import base64
import binascii
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
from opentelemetry.util.types import AttributeValue

from contract.errors import MillraceError, Reason, invalid
from gateway.auth.directory import KeyDirectory, Principal
from gateway.auth.verifier import Arrival, CallerVerifier, context_of
from gateway.tiers import Tiers
from gateway.types.error_form import KEY_ADVICE, ErrorForms
from gateway.types.request import MAX_CLIENT_REQUEST_ID, Caller, Identity
from observability.emit import names
from observability.emit.metrics import NO_EXEMPLAR, Metrics
from observability.emit.tracing import RemoteSpan, Telemetry
from runtime.context import CONTEXT_HEADER, sign, to_header
from runtime.deferred import Deferred

TENANT_HEADER = "x-millrace-tenant"
KEY_HEADER = "x-millrace-key"
# Set when a limit of requests per minute applies; without it Envoy does not ask the rate limit service.
COUNTED_HEADER = "x-millrace-counted"
# Claims of a token that Envoy's jwt_authn filter has verified: JSON in base64url.
CLAIMS_HEADER = "x-millrace-jwt-claims"
# Copy of the client's content type, which tells the form of a refusal. The question itself must not have it:
# Envoy answers its own "gRPC" question that fails with HTTP 200, which would let the request through.
CONTENT_TYPE_HEADER = "x-millrace-content-type"
# Where Envoy asks: the client's own path follows. Envoy lets no client's request there, however it spells the
# path: what makes a question is a header that clients cannot send.
AUTHORIZE_PREFIX = "/edge/authorize/"
QUESTION_HEADER = "x-millrace-question"
# Headers that other APIs have the key in, as it is; taken where there is no authorization header.
API_KEY_HEADERS = ("x-api-key", "api-key")
CREDENTIALS_HEADERS = ("authorization", *API_KEY_HEADERS)
# Milliseconds that a client waits for its answer, as a gRPC call's own time-out: its deadline.
TIMEOUT_HEADER = "x-millrace-timeout-ms"
_IS_TIMEOUT = re.compile(rb"0*[1-9][0-9]{0,8}").fullmatch
# Envoy drops the request headers that this header of an answer names.
_REMOVED = (
    b"x-envoy-auth-headers-to-remove",
    ",".join((*CREDENTIALS_HEADERS, CLAIMS_HEADER, CONTENT_TYPE_HEADER)).encode(),
)
_COUNTED = (COUNTED_HEADER.encode(), b"1")
_SCHEME = b"bearer "
_API_KEY_NAMES = tuple(name.encode() for name in API_KEY_HEADERS)
NO_CREDENTIALS = f"no API key was sent; send the header {KEY_ADVICE}"
# The ids of tokens are their issuer's words.
_CONTROL_CHARACTERS = bytes([*range(32), 127])
_decode_claims = msgspec.json.Decoder(dict[str, Any]).decode


class EdgeAnswer(msgspec.Struct, frozen=True):
    """The answer to Envoy: 200 with headers for the request, or the refusal as the client will read it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes = b""


class Authorizer:
    """Answers each question with a signed context, or with a refusal in the form of the path that was asked
    for. gRPC clients get the status that Envoy derives from the HTTP one (401 UNAUTHENTICATED,
    403 PERMISSION_DENIED) with the message, and the rich status in its trailer.
    """

    def __init__(
        self,
        directory: KeyDirectory,
        tiers: Tiers,
        secret: bytes,
        telemetry: Telemetry,
        metrics: Metrics,
        deferred: Deferred,
        error_forms: ErrorForms,
    ) -> None:
        self._directory = directory
        self._error_forms = error_forms
        self._deferred = deferred
        self._tiers = tiers
        self._secret = secret
        self._telemetry = telemetry
        self._metrics = metrics

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> EdgeAnswer:
        """Answers a question of Envoy's by a request's path and headers (names in lower case)."""
        try:
            identity = self.authenticate(headers)
        except MillraceError as error:
            form = self._error_forms.of(path, _text(headers, CONTENT_TYPE_HEADER.encode()))
            refused = [(name.encode(), value.encode()) for name, value in form.headers(error).items()]
            body = form.body(error, _text(headers, b"x-request-id"))
            return EdgeAnswer(form.status(error), refused, body)
        return self._allowed(identity)

    def authenticate(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Authenticates one request; raises what its caller is told."""
        started_s = time.monotonic()
        try:
            principal = self._principal(headers)
        except MillraceError as error:
            self._deferred.call(self._record, headers, started_s, time.monotonic(), None, error.reason.value)
            raise
        self._deferred.call(self._record, headers, started_s, time.monotonic(), principal, "")
        return Identity(
            request_id=_text(headers, b"x-request-id"),
            tenant=principal.tenant,
            key_id=principal.key_id,
            tier=principal.tier,
            cache_salt=principal.cache_salt,
            allowed_models=principal.allowed_models,
            traceparent=_text(headers, b"traceparent"),
            tracestate=_text(headers, b"tracestate"),
        )

    def _record(
        self,
        headers: Mapping[bytes, bytes],
        started_s: float,
        ended_s: float,
        principal: Principal | None,
        refusal: str,
    ) -> None:
        if principal is None:
            self._metrics.add(names.REJECTIONS, reason=refusal, tier="")
        self._metrics.observe(names.AUTHORIZE_SECONDS, ended_s - started_s, span=NO_EXEMPLAR)
        self._telemetry.step(
            names.GATEWAY_AUTHORIZE,
            of=RemoteSpan(_text(headers, b"traceparent"), _text(headers, b"tracestate")),
            start_s=started_s,
            end_s=ended_s,
            attributes=_recorded(headers, principal, refusal),
            error=refusal,
        )

    def _principal(self, headers: Mapping[bytes, bytes]) -> Principal:
        claims = headers.get(CLAIMS_HEADER.encode(), b"")
        if claims:
            return self._directory.principal_of_claims(_claims(claims))
        credentials = headers.get(b"authorization", b"")
        if not credentials:
            key = next(filter(None, map(headers.get, _API_KEY_NAMES)), b"")
            if not key:
                raise MillraceError(Reason.MISSING_CREDENTIALS, NO_CREDENTIALS)
            return self._directory.authenticate(key.strip().decode("latin-1"))
        if credentials[: len(_SCHEME)].lower() != _SCHEME:
            raise MillraceError(
                Reason.INVALID_CREDENTIALS,
                f"the authorization header has another scheme than Bearer; send {KEY_ADVICE}",
            )
        return self._directory.authenticate(credentials[len(_SCHEME) :].strip().decode("latin-1"))

    def _allowed(self, identity: Identity) -> EdgeAnswer:
        weight = self._tiers.tenant_weight(identity.tenant)
        context = context_of(identity, self._tiers.named(identity.tier), tenant_weight=weight)
        added = [
            (CONTEXT_HEADER.encode(), to_header(sign(context, self._secret)).encode()),
            (TENANT_HEADER.encode(), header_value(identity.tenant)),
            (KEY_HEADER.encode(), header_value(identity.key_id)),
            _REMOVED,
        ]
        if self.is_counted(identity.tenant, identity.key_id):
            added.append(_COUNTED)
        return EdgeAnswer(200, added)

    def is_counted(self, tenant: str, key_id: str) -> bool:
        """Whether a limit of requests per minute applies."""
        limits = (self._directory.tenant_limits(tenant), self._directory.key_limits(key_id))
        return any(limit.requests_per_minute is not None for limit in limits)


def _recorded(
    headers: Mapping[bytes, bytes], principal: Principal | None, refusal: str
) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {names.REQUEST_ID: _text(headers, b"x-request-id")}
    # A request that is refused here has no other span that could say it.
    if client_request_id := _text(headers, b"x-client-request-id"):
        found[names.CLIENT_REQUEST_ID] = client_request_id[:MAX_CLIENT_REQUEST_ID]
    if principal is None:
        found[names.OUTCOME] = refusal
    else:
        found |= {
            names.TENANT: principal.tenant,
            names.KEY_ID: principal.key_id,
            names.TIER: principal.tier,
        }
    return found


def header_value(text: str) -> bytes:
    """A text that somebody else chose, as the value of a header: control characters would end it."""
    return text.encode("utf-8", "replace").translate(None, _CONTROL_CHARACTERS)


def _text(headers: Mapping[bytes, bytes], name: bytes) -> str:
    return headers.get(name, b"").decode("latin-1")


def _timeout_s(headers: Mapping[bytes, bytes]) -> float | None:
    text = headers.get(_TIMEOUT)
    if text is None:
        return None
    if not _IS_TIMEOUT(text):
        problem = f"{text[:40].decode('latin-1')!r} is not a number of milliseconds from 1 to 999999999"
        raise invalid(TIMEOUT_HEADER, f"{problem}; leave it out to wait as long as it takes")
    return int(text) / 1000


def _claims(text: bytes) -> dict[str, Any]:
    try:
        return _decode_claims(base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4)))
    except (binascii.Error, ValueError, msgspec.DecodeError) as error:
        raise MillraceError(
            Reason.INVALID_CREDENTIALS, "the verified token's claims cannot be read as JSON"
        ) from error


# The caller of an HTTP request is read from a context that somebody in front has signed, or from credentials.
# Envoy asks about gRPC calls before it sends them on (`authorizer`). An HTTP request it sends at once, with
# its credentials: the question would cost the gateway and Envoy more than most of what follows.

_CONTEXT, _TIMEOUT = CONTEXT_HEADER.encode(), TIMEOUT_HEADER.encode()


class HttpCallers:
    """Identifies callers by their headers; Envoy has dropped what clients may not send."""

    def __init__(self, authorizer: Authorizer, verifier: CallerVerifier) -> None:
        self._authorizer = authorizer
        self._verifier = verifier

    def identify(self, headers: Mapping[bytes, bytes], received_s: float) -> Caller:
        """The caller of a request; names of `headers` are in lower case.

        Raises MISSING_CREDENTIALS, INVALID_CREDENTIALS, TENANT_NOT_ALLOWED, TIER_NOT_ALLOWED,
        CONTEXT_SIGNATURE_INVALID, and INVALID_ARGUMENT for a time-out that is none.
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
            timeout_s=_timeout_s(headers),
        )
        signed = headers.get(_CONTEXT)
        if signed is not None:
            return self._verifier.verify(signed.decode("latin-1"), arrival)
        return self._verifier.caller(self._authorizer.authenticate(headers), arrival)

    def again(self, caller: Caller, request_id: str, received_s: float) -> Caller:
        """The caller of a further request on a connection that somebody in front has signed a context for."""
        return self._verifier.again(caller, request_id, received_s)

    def is_counted(self, caller: Caller) -> bool:
        """Whether a limit of requests per minute applies that nobody has counted this request against."""
        return caller.context is None and self._authorizer.is_counted(
            caller.identity.tenant, caller.identity.key_id
        )
