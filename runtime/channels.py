"""Client channels with the options that a streaming suite needs."""

from __future__ import annotations

import grpc
from opentelemetry import propagate

from runtime import tls

# Vocabularies and long prompts travel in one message: some ten megabytes at most. Each may be kept whole.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# How soon a peer that says nothing is asked, and how long it may take to answer. gRPC's core answers beside
# the process's own work: only one that stands still does not, and its calls end within ten seconds.
KEEPALIVE_S = 5.0
KEEPALIVE_LIMIT_S = 4.0
# Headers of one call. Signed contexts and traces are the largest of ours; more than this is refused.
MAX_METADATA_BYTES = 32 * 1024
# Calls at a time on one connection; clients wait with more, or open another. Each may have its largest
# message under way: gRPC does not limit their bytes together. These ports are for the services' network.
MAX_CALLS = 4096

_COMMON = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
    ("grpc.keepalive_timeout_ms", round(KEEPALIVE_LIMIT_S * 1000)),
    # Where this is longer, as it is by default, the core waits so long for the answer to a keep-alive's ping.
    ("grpc.http2.ping_timeout_ms", round(KEEPALIVE_LIMIT_S * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    # No limit on pings without data: gRPC's core would otherwise ask a peer that only listens once a minute.
    ("grpc.http2.max_pings_without_data", 0),
)

CLIENT_OPTIONS = (
    *_COMMON,
    # A peer that restarts is found again at once, not after two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In gRPC's core this is the time that one connection attempt is given, not a pause between attempts.
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Two channels to the same address must not share a connection's flow control.
    ("grpc.use_local_subchannel_pool", 1),
)

SERVER_OPTIONS = (
    *_COMMON,
    ("grpc.so_reuseport", 0),
    # A message that is packed says nothing of its size before it is unpacked: of the encodings only identity.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Ports ask nobody who they are. gRPC's core itself stops reading from whoever makes it queue answers to
    # SETTINGS, PING and resets, and refuses streams that are opened and reset beyond the number of calls.
    ("grpc.http2.min_ping_interval_without_data_ms", 2_000),
    ("grpc.http2.max_ping_strikes", 2),
    ("grpc.max_concurrent_streams", MAX_CALLS),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)


def connect(target: str) -> grpc.aio.Channel:
    """A channel to `target` (host:port or unix:path), with TLS where the process uses it (runtime.tls)."""
    secure = tls.current()
    if secure is None:
        return grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS)
    options = (*CLIENT_OPTIONS, *secure.channel_options())
    return grpc.aio.secure_channel(target, secure.channel_credentials(), options=options)


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current W3C trace context as call metadata."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
