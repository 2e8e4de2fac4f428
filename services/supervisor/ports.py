"""Ports for the processes of the local stack."""

from __future__ import annotations

import random
import socket

from runtime.errors import ConfigError

# Below the range from which systems take the local ends of outgoing connections, so that a port that was
# free when it was chosen is still free when its process binds it.
_FIRST, _LAST = 20_000, 32_000


def can_bind(host: str, port: int) -> bool:
    """Whether a listener could be opened on `host`:`port` now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` different ports that are free at this moment."""
    chosen: list[int] = []
    candidates = random.sample(range(_FIRST, _LAST), _LAST - _FIRST)
    for port in candidates:
        if len(chosen) == count:
            return chosen
        if can_bind(host, port):
            chosen.append(port)
    raise ConfigError(f"no {count} free ports between {_FIRST} and {_LAST} on {host}")


def require_free(host: str, port: int) -> None:
    """Raises ConfigError when the port that clients are to use is taken or not allowed."""
    if can_bind(host, port):
        return
    if not can_bind(host, 0):
        raise ConfigError(
            f"--host {host}: this machine has no such address; give one that it has, for example 127.0.0.1, "
            "or 0.0.0.0 for all of them"
        )
    raise ConfigError(
        f"--port {port}: cannot listen on {host}:{port}; another program uses it, or it is not allowed. "
        f"Choose another one with --port, or 0 for any free one"
    )
