"""Counters in this process. Exact: nothing is awaited between looking and charging."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.limits.store import (
    BUCKET_MS,
    NUM_BUCKETS,
    Demand,
    Granted,
    Kind,
    LeaseDemand,
    LeaseReturn,
    LimitRefused,
    MeterDemand,
    Settlement,
    WindowChange,
    WindowDemand,
)


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
