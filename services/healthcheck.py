"""`python -m services.healthcheck HOST:PORT [SERVICE]`: asks grpc.health.v1 once, for container health.

Where the environment names certificates (MILLRACE_SECURITY__TLS_...), it asks with them.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services import tls
from services.config import SecurityConfig, load_section, read_tables
from services.errors import ConfigError

_TIMEOUT_S = 3.0


def main(arguments: list[str]) -> int:
    """0 when the server says SERVING; 1, with the reason, when it does not; 2 for bad usage."""
    if len(arguments) not in {1, 2}:
        print(__doc__, file=sys.stderr)
        return 2
    target, service = arguments[0], "".join(arguments[1:])
    try:
        channel = _channel(target)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    with channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(f"{target}: {error.code().name}", file=sys.stderr)
            return 1
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
        print(f"{target}: {status}", file=sys.stderr)
        return 1
    return 0


def _channel(target: str) -> grpc.Channel:
    secure = tls.load(load_section(read_tables(None), "security", SecurityConfig))
    if secure is None:
        return grpc.insecure_channel(target)
    return grpc.secure_channel(target, secure.channel_credentials(), options=secure.channel_options())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
