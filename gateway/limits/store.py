"""What limits are made of, and the one interface behind which their counters live.

Three kinds of counters are enough. A *window* sums what was charged in the last 60 s. A *lease* has some of a
number of slots, free again when it is returned or when its holder stops renewing it. A *meter* sums what was
charged in a calendar month.

Every charge is a demand on several counters that is granted on all of them or on none. Demands and
settlements have ids, under which a shared store counts each once: one that was not answered can be repeated.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import msgspec

from gateway.config import LimitValues

# Whose limits apply to a request: its tenant's and its key's, looked up by name.


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


def requests_key(scope: Scope) -> str:
    """Key of the window of a scope's requests per minute."""
    return f"{scope.key}:rpm"


WINDOW_MS = 60_000
# Charges of the same half second leave the window together, up to half a second late, never early: no
# interval of 60 s, wherever it begins, holds more than the limit.
BUCKET_MS = 500
NUM_BUCKETS = WINDOW_MS // BUCKET_MS + 1


class Kind(StrEnum):
    """Kind of a counter."""

    WINDOW = "window"
    LEASE = "lease"
    METER = "meter"


class WindowDemand(msgspec.Struct, frozen=True):
    """`amount` more in the window of `key`, if its sum stays within `limit`."""

    key: str
    limit: int
    amount: int


class LeaseReturn(msgspec.Struct, frozen=True):
    """Frees all slots that one lease has."""

    key: str
    lease_id: str
    slots: int = 1


class LeaseDemand(msgspec.Struct, frozen=True):
    """So many slots of `key`, held as `lease_id`, if all of them are free under `limit`."""

    key: str
    limit: int
    lease_id: str
    slots: int = 1

    @property
    def given_back(self) -> LeaseReturn:
        """What frees them."""
        return LeaseReturn(self.key, self.lease_id, self.slots)


class MeterDemand(msgspec.Struct, frozen=True):
    """`base` plus up to `units` times `unit_cost` more on the meter of `key`, within `limit`.

    Fewer units are granted when the rest of the limit is smaller; the demand is refused when not even the
    base and one unit (no unit where `units` is 0) fit.
    """

    key: str
    limit: int
    base: int
    unit_cost: int
    units: int


def new_operation() -> str:
    """An id for a demand or a settlement, never used before."""
    return secrets.token_hex(16)


class Demand(msgspec.Struct, frozen=True):
    """Charges that are granted together or not at all."""

    windows: tuple[WindowDemand, ...] = ()
    leases: tuple[LeaseDemand, ...] = ()
    meters: tuple[MeterDemand, ...] = ()
    # Keys of windows that have counted the request as one, within the milliseconds since it came: each gives
    # it back where a lease refuses, so that waiting for a slot uses up no requests per minute.
    counted: tuple[str, ...] = ()
    age_ms: int = 0
    operation: str = msgspec.field(default_factory=new_operation)

    def __bool__(self) -> bool:
        return bool(self.windows or self.leases or self.meters)


class Granted(msgspec.Struct, frozen=True):
    """The demand was charged."""

    # Bucket that the window amounts were charged to; needed to give them back.
    bucket: int
    # Sum of each window after the charge, in the order of the demand.
    window_sums: tuple[int, ...] = ()
    # Units granted on each meter, in the order of the demand.
    meter_units: tuple[int, ...] = ()
    # Sum of each meter after the charge.
    meter_sums: tuple[int, ...] = ()


class LimitRefused(msgspec.Struct, frozen=True):
    """The demand was not charged; `kind` and `index` name the counter of the demand that refused it."""

    kind: Kind
    index: int
    # Sum of the counter at that moment.
    used: int
    # When enough will have left a window; None when only others' actions or the next month can help, or
    # when the amount is larger than the limit.
    retry_after_ms: int | None = None


class WindowChange(msgspec.Struct, frozen=True):
    """Adds `delta` to a window without asking. Negative: gives back what was charged to `bucket`.

    What has left the window cannot be given back; what is added counts from now.
    """

    key: str
    bucket: int
    delta: int


class MeterChange(msgspec.Struct, frozen=True):
    """Adds `delta`, positive or negative, to a meter without asking."""

    key: str
    delta: int


class Settlement(msgspec.Struct, frozen=True):
    """Corrections after the fact; they are always applied."""

    windows: tuple[WindowChange, ...] = ()
    leases: tuple[LeaseReturn, ...] = ()
    meters: tuple[MeterChange, ...] = ()
    operation: str = msgspec.field(default_factory=new_operation)

    def __bool__(self) -> bool:
        return bool(self.windows or self.leases or self.meters)


def reversal(demand: Demand, granted: Granted) -> Settlement:
    """Gives back all that was charged for `demand`, once."""
    charged = zip(demand.meters, granted.meter_units, strict=True)
    return Settlement(
        windows=tuple(WindowChange(each.key, granted.bucket, -each.amount) for each in demand.windows),
        leases=tuple(each.given_back for each in demand.leases),
        meters=tuple(MeterChange(each.key, -each.base - units * each.unit_cost) for each, units in charged),
        operation=f"{demand.operation}-back",
    )


class StoreLostError(Exception):
    """The place where counters live does not answer."""


class LimitStore(Protocol):
    """Counters shared by everybody who uses the same store."""

    # Nothing is awaited: no call of it can be cancelled halfway.
    is_immediate: bool

    async def acquire(self, demand: Demand) -> Granted | LimitRefused:
        """Charges all of `demand` atomically, or nothing. Raises StoreLostError."""
        ...

    async def settle(self, settlement: Settlement) -> None:
        """Applies corrections. Raises StoreLostError."""
        ...

    async def renew(self, leases: tuple[LeaseReturn, ...]) -> None:
        """Keeps the slots of streams that still run. Raises StoreLostError."""
        ...

    async def raise_meters(self, sums: Mapping[str, int]) -> None:
        """Lets each meter hold at least what is known to have been used. Raises StoreLostError."""
        ...

    async def close(self) -> None:
        """Releases connections."""
        ...


def unix_s() -> float:
    """Seconds since the Unix epoch."""
    return time.time()


def unix_ms() -> int:
    """Milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Window:
    # [bucket, amount], oldest first.
    charges: deque[list[int]] = field(default_factory=deque)
    total: int = 0

    def prune(self, bucket: int) -> None:
        while self.charges and self.charges[0][0] <= bucket - NUM_BUCKETS:
            self.total -= self.charges.popleft()[1]

    def add(self, bucket: int, amount: int) -> None:
        self.total += amount
        if self.charges and self.charges[-1][0] >= bucket:
            # The wall clock may step back; charges stay in order.
            self.charges[-1][1] += amount
        else:
            self.charges.append([bucket, amount])

    def give_back(self, bucket: int, amount: int) -> None:
        for charge in self.charges:
            if charge[0] >= bucket:
                returned = min(amount, charge[1])
                charge[1] -= returned
                self.total -= returned
                return

    def uncount(self, since_bucket: int) -> None:
        """Gives back one that was charged since then. It is never taken out of a bucket behind its own, so no
        60 s hold too many.
        """
        for charge in self.charges:
            if charge[0] >= since_bucket and charge[1]:
                charge[1] -= 1
                self.total -= 1
                return

    def wait_ms(self, limit: int, amount: int, now_ms: int) -> int | None:
        """Time until `amount` fits."""
        if amount > limit:
            return None
        excess = self.total + amount - limit
        for bucket, charged in self.charges:
            excess -= charged
            if excess <= 0:
                return max(1, (bucket + NUM_BUCKETS) * BUCKET_MS - now_ms)
        return None


@dataclass(slots=True)
class _Lease:
    slots: int
    # In Unix milliseconds.
    lapses_ms: int


class MemoryLimitStore:
    """LimitStore for one gateway process; nothing survives the process. `clock` gives Unix milliseconds."""

    is_immediate = True

    def __init__(self, *, lease_ttl_s: float, clock: Callable[[], int] = unix_ms) -> None:
        self._clock = clock
        self._lease_ttl_ms = round(lease_ttl_s * 1000)
        self._windows: dict[str, _Window] = {}
        self._leases: dict[str, dict[str, _Lease]] = {}
        self._meters: dict[str, int] = {}

    async def acquire(self, demand: Demand) -> Granted | LimitRefused:
        now_ms = self._clock()
        bucket = now_ms // BUCKET_MS
        refused = (
            self._refuse_windows(demand.windows, now_ms)
            or self._refuse_leases(demand.leases, now_ms)
            or self._refuse_meters(demand.meters)
        )
        if refused is not None:
            if refused.kind is Kind.LEASE:
                for key in demand.counted:
                    self._window(key, bucket).uncount((now_ms - demand.age_ms) // BUCKET_MS)
            return refused
        for window in demand.windows:
            self._window(window.key, bucket).add(bucket, window.amount)
        for lease in demand.leases:
            held = self._leases.setdefault(lease.key, {})
            held[lease.lease_id] = _Lease(lease.slots, now_ms + self._lease_ttl_ms)
        units = tuple(self._charge_meter(meter) for meter in demand.meters)
        return Granted(
            bucket=bucket,
            window_sums=tuple(self._windows[window.key].total for window in demand.windows),
            meter_units=units,
            meter_sums=tuple(self._meters[meter.key] for meter in demand.meters),
        )

    async def settle(self, settlement: Settlement) -> None:
        bucket = self._clock() // BUCKET_MS
        for change in settlement.windows:
            self._change_window(change, bucket)
        for lease in settlement.leases:
            self._leases.get(lease.key, {}).pop(lease.lease_id, None)
        for meter in settlement.meters:
            self._meters[meter.key] = max(0, self._meters.get(meter.key, 0) + meter.delta)

    async def renew(self, leases: tuple[LeaseReturn, ...]) -> None:
        expiry = self._clock() + self._lease_ttl_ms
        for lease in leases:
            held = self._leases.get(lease.key, {})
            if lease.lease_id in held:
                held[lease.lease_id].lapses_ms = expiry

    async def close(self) -> None:
        """Nothing to release."""

    async def raise_meters(self, sums: Mapping[str, int]) -> None:
        for key, at_least in sums.items():
            self._meters[key] = max(self._meters.get(key, 0), at_least)

    def _window(self, key: str, bucket: int) -> _Window:
        window = self._windows.get(key)
        if window is None:
            window = self._windows[key] = _Window()
        window.prune(bucket)
        return window

    def _refuse_windows(self, demands: tuple[WindowDemand, ...], now_ms: int) -> LimitRefused | None:
        for index, demand in enumerate(demands):
            window = self._window(demand.key, now_ms // BUCKET_MS)
            if window.total + demand.amount > demand.limit:
                wait_ms = window.wait_ms(demand.limit, demand.amount, now_ms)
                return LimitRefused(Kind.WINDOW, index, window.total, wait_ms)
        return None

    def _refuse_leases(self, demands: tuple[LeaseDemand, ...], now_ms: int) -> LimitRefused | None:
        for index, demand in enumerate(demands):
            held = self._leases.get(demand.key, {})
            for lapsed in [lease_id for lease_id, lease in held.items() if lease.lapses_ms <= now_ms]:
                del held[lapsed]
            used = sum(lease.slots for lease in held.values())
            if used + demand.slots > demand.limit:
                return LimitRefused(Kind.LEASE, index, used)
        return None

    def _refuse_meters(self, demands: tuple[MeterDemand, ...]) -> LimitRefused | None:
        for index, demand in enumerate(demands):
            used = self._meters.get(demand.key, 0)
            least = demand.base + (demand.unit_cost if demand.units else 0)
            if used + least > demand.limit or used >= demand.limit:
                return LimitRefused(Kind.METER, index, used)
        return None

    def _charge_meter(self, demand: MeterDemand) -> int:
        used = self._meters.get(demand.key, 0)
        units = demand.units
        if demand.unit_cost:
            units = min(units, (demand.limit - used - demand.base) // demand.unit_cost)
        self._meters[demand.key] = used + demand.base + units * demand.unit_cost
        return units

    def _change_window(self, change: WindowChange, bucket: int) -> None:
        window = self._window(change.key, bucket)
        if change.delta >= 0:
            window.add(bucket, change.delta)
        elif change.bucket > bucket - NUM_BUCKETS:
            window.give_back(change.bucket, -change.delta)
