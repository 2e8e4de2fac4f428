"""`python -m runtime.healthcheck HOST:PORT [SERVICE] [--hold SECONDS]`: asks grpc.health.v1, for containers.

With --hold it answers when the health is not what it said last, and otherwise after that time: a container
engine that asks again at once learns news within a second, and starts no more processes than one that asks
seldom. Where the environment names certificates (MILLRACE_SECURITY__TLS_...), it asks with them.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import tempfile
import time
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime import tls
from runtime.config import SecurityConfig, load_section, read_tables
from runtime.errors import ConfigError

_TIMEOUT_S = 3.0
_PAUSE_S = 0.5
# While nobody listens yet, the next question is not to wait for gRPC's growing pauses between attempts.
_OPTIONS = (("grpc.initial_reconnect_backoff_ms", 250), ("grpc.max_reconnect_backoff_ms", 500))


def main(arguments: list[str]) -> int:
    """0 when the server says SERVING; 1, with the reason, when it does not; 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="python -m runtime.healthcheck", description=__doc__)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("service", nargs="?", default="")
    parser.add_argument("--hold", type=float, default=0.0, metavar="SECONDS")
    given = parser.parse_args(arguments)
    try:
        channel = _channel(given.target)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    # There as long as the last answer was that it serves.
    said = Path(tempfile.gettempdir()) / re.sub(r"\W", "-", f"serving-{given.target}-{given.service}")
    end_s = time.monotonic() + given.hold
    with channel:
        complaint = _complaint(channel, given.service)
        while bool(complaint) is not said.exists() and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
            complaint = _complaint(channel, given.service)
    # Without a place to write to, no answer is held back.
    with contextlib.suppress(OSError):
        said.unlink(missing_ok=True) if complaint else said.touch()
    if complaint:
        print(f"{given.target}: {complaint}", file=sys.stderr)
    return int(bool(complaint))


def _complaint(channel: grpc.Channel, service: str) -> str:
    """What keeps the server from being healthy; "" when nothing does."""
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
        )
    except grpc.RpcError as error:
        return str(error.code().name)
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


def _channel(target: str) -> grpc.Channel:
    secure = tls.load(load_section(read_tables(None), "security", SecurityConfig))
    if secure is None:
        return grpc.insecure_channel(target, options=_OPTIONS)
    options = (*_OPTIONS, *secure.channel_options())
    return grpc.secure_channel(target, secure.channel_credentials(), options=options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
