"""Where engines are found: a fixed list, DNS records, or a file; followed while the gateway runs."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

Lookup = Callable[[], Awaitable[list[str]]]

# host:port, [IPv6]:port, with gRPC's dns: or without; or a Unix socket.
_ADDRESS = re.compile(r"unix:\S+|(?:dns:/*)?(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", re.ASCII)
# Whoever writes a file in place has been through with it for at least this long.
_SETTLED_S = 0.05


def lookup_of(discovery: str, static: Sequence[str]) -> Lookup:
    """The lookup that `discovery` names: "static", "dns:<host>:<port>" or "file:<path>"; else a
    ConfigError.
    """
    kind, _, rest = discovery.partition(":")
    if kind == "static" and not rest:
        return lambda: _static(static)
    if kind == "dns":
        host, _, port = rest.rpartition(":")
        if host and port.isdigit():
            return lambda: _dns(host, int(port))
    if kind == "file" and rest:
        return lambda: asyncio.to_thread(_file, Path(rest))
    raise ConfigError(
        f'gateway.discovery: {discovery!r} is not "static", "dns:<host>:<port>" or "file:<path>"'
    )


async def _static(targets: Sequence[str]) -> list[str]:
    return list(targets)


async def resolve(host: str, port: int) -> list[Any]:
    """Address records of a name, in getaddrinfo's form."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _dns(host: str, port: int) -> list[str]:
    # A headless service resolves to one record per ready pod.
    infos = await resolve(host, port)
    addresses = {info[4][0] for info in infos}
    return sorted(
        f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}" for address in addresses
    )


def _file(path: Path) -> list[str]:
    """The addresses in a file. Raises ValueError for one that is being written, or cannot be meant: engines
    are not given up for that.
    """
    content = path.read_bytes()
    time.sleep(_SETTLED_S)
    if path.read_bytes() != content:
        raise ValueError(f"{path} is being written")
    # With or without a byte order mark; what is not UTF-8 can only be a comment, or no address.
    text = content.decode("utf-8-sig", errors="replace")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    # What stands there twice is one engine.
    addresses = list(dict.fromkeys(line for line in lines if line))
    wrong = next((each for each in addresses if not _ADDRESS.fullmatch(each)), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong!r} is not host:port")
    if not addresses:
        raise ValueError(f"{path} names no engine")
    return addresses


async def follow(
    lookup: Lookup, apply: Callable[[Sequence[str]], Awaitable[None]], interval_s: float
) -> None:
    """Applies every change of what `lookup` finds, until cancelled.

    A lookup that fails changes nothing: engines that were found stay.
    """
    known: list[str] | None = None
    while True:
        try:
            found = await lookup()
        except (OSError, ValueError) as error:
            # A name that cannot be looked up is a ValueError.
            _log.warning("discovery of engines failed, the known ones stay: %s", error)
        else:
            if found != known:
                _log.info("engines: %s", ", ".join(found) or "none")
                await apply(found)
                known = found
        await asyncio.sleep(interval_s)
