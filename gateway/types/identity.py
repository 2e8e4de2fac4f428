"""Who is asking: the verified request context as a domain type."""

from __future__ import annotations

import msgspec

# Characters of a client's own id that are kept.
MAX_CLIENT_REQUEST_ID = 128


class Identity(msgspec.Struct, frozen=True):
    """What authentication established about one request. Nothing in it comes from the client unchecked."""

    request_id: str
    tenant: str
    # Public identifier of the API key, or "jwt:<subject>"; never the secret.
    key_id: str
    # Tier that the request gets unless it asks for another one.
    tier: str
    # Separates prefix-cache entries between tenants.
    cache_salt: bytes = b""
    # Models that the key may use; empty means every model.
    allowed_models: tuple[str, ...] = ()
    # W3C trace context of the edge.
    traceparent: str = ""
    tracestate: str = ""
    # Moment after which nobody wants the answer, milliseconds since the Unix epoch; None means none.
    deadline_unix_ms: int | None = None
