"""Ports for the processes of the local stack, which nobody else is given while its supervisor holds them."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable

from runtime.errors import ConfigError

# Below the range from which systems take the local ends of outgoing connections, so that a port that was
# free when it was chosen is still free when its process binds it.
_FIRST, _LAST = 20_000, 32_000

# Sockets that are bound and never listen, by their ports. The stack's own processes bind beside them, because
# they set SO_REUSEADDR.
_held: dict[int, socket.socket] = {}


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


def free_ports(count: int, host: str = "127.0.0.1", *, beside: Collection[int] = ()) -> list[int]:
    """`count` different free ports, none of them in `beside`. Nobody else is given them until this process
    ends or calls `release`, not even between two processes that listen there one after the other.
    """
    chosen: list[int] = []
    for port in random.sample(range(_FIRST, _LAST), _LAST - _FIRST):
        if len(chosen) == count:
            return chosen
        if port not in beside and _hold(host, port):
            chosen.append(port)
    raise ConfigError(f"no {count} free ports between {_FIRST} and {_LAST} on {host}")


def _hold(host: str, port: int) -> bool:
    holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without the option first: with it, two that do not listen could have the same port.
        holder.bind((host, port))
    except OSError:
        holder.close()
        return False
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held[port] = holder
    return True


def release(addresses: Iterable[str]) -> None:
    """Holds the ports of `addresses` ("host:port") no more."""
    for address in addresses:
        if holder := _held.pop(int(address.rpartition(":")[2]), None):
            holder.close()


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
