"""Whose limits apply to a request: its tenant's and its key's, looked up by name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from gateway.config import LimitValues


class Scope(msgspec.Struct, frozen=True):
    """One holder of limits."""

    # "tenant" or "key", as refusals call it.
    kind: str
    # Name as refusals give it.
    name: str
    # Prefix of its counters in a store.
    key: str
    limits: LimitValues

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class LimitDirectory(Protocol):
    """Knows the limits of tenants and keys; they may change between two requests."""

    def tenant_limits(self, tenant: str) -> LimitValues:
        """Limits of a tenant."""
        ...

    def key_limits(self, key_id: str) -> LimitValues:
        """Limits of a key alone."""
        ...


_UNLIMITED = LimitValues()


def meter_key(scope: str, unit: Literal["tokens", "cost"], month: str) -> str:
    """Key of a monthly meter ("2026-11") of a scope, by the scope's own key."""
    return f"{scope}:{unit}:{month}"


def month_of(unix_s: float) -> str:
    """The month of a moment, in UTC."""
    return time.strftime("%Y-%m", time.gmtime(unix_s))


def scopes_of(directory: LimitDirectory, tenant: str, key_id: str) -> Iterator[Scope]:
    """The scopes that limit anything, the tenant's first."""
    limits = directory.tenant_limits(tenant)
    if limits != _UNLIMITED:
        yield Scope("tenant", tenant, f"tenant:{tenant}", limits)
    limits = directory.key_limits(key_id)
    if limits != _UNLIMITED:
        yield Scope("key", key_id, f"key:{key_id}", limits)
