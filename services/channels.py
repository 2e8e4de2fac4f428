"""Client channels with the options that a streaming suite needs."""

from __future__ import annotations

import os

import grpc
from opentelemetry import propagate

from services import tls

# gRPC's asyncio has one thread that waits for completions. Its newer event engine reads sockets on threads of
# its own, which wake that one, which wakes the event loop; without it the waiting thread reads the sockets
# itself, and every message is spared a change of threads. Read when the first channel or server is made.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")

# Vocabularies and long prompts travel in one message: some ten megabytes at most. Each may be kept whole.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_COMMON = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)

CLIENT_OPTIONS = (
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
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
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
)


def connect(target: str) -> grpc.aio.Channel:
    """A channel to `target` (host:port or unix:path), with TLS where the process uses it (services.tls)."""
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
