"""Addresses of hosts and ports, as people and configurations write them."""

from __future__ import annotations

from ipaddress import ip_address


def is_this_machine(host: str) -> bool:
    """Whether a host can be reached from this machine only. An address of IPv6 has no brackets."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def join(host: str, port: int) -> str:
    """host:port, with an address of IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def with_port(listen: str, port: int) -> str:
    """`listen` (host:port) with the port that was taken where it asks for any (0)."""
    return f"{listen.rpartition(':')[0]}:{port}"
