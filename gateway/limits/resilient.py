"""What happens when the shared store is lost, as configured, and how it is found again.

"closed": charges raise StoreLostError, which callers turn into 503. "local_share": this process counts alone,
each limit divided by the number of gateways. At the moment of the loss, what the shared windows held is not
known here: for one window length a limit can be passed by up to itself once more. A request with more streams
than the share is refused until the store is back. Meters go on from the sums last seen, and what was used
meanwhile is added to the shared ones when the store is back.

What was sent and not answered may have arrived or not. When the store answers again, settlements are repeated
under their ids, and charges are taken back: their callers have had another answer, or are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal, Protocol

from msgspec.structs import replace

from gateway.limits.store import (
    Demand,
    Granted,
    LeaseReturn,
    LimitRefused,
    LimitStore,
    MemoryLimitStore,
    MeterChange,
    Settlement,
    StoreLostError,
)

_log = logging.getLogger(__name__)
_PROBE_INTERVAL_S = 1.0

Policy = Literal["closed", "local_share"]


class SharedStore(LimitStore, Protocol):
    """A store that can be lost. What is repeated under its id counts once."""

    async def take_back(self, demand: Demand) -> None:
        """Undoes a charge that was perhaps made. Raises StoreLostError."""
        ...

    async def ping(self) -> None:
        """Raises StoreLostError unless the store answers."""
        ...


class ResilientLimitStore:
    """LimitStore over a shared one that may go away. `start` watches it; `is_up` says how it is."""

    is_immediate = False

    def __init__(
        self,
        shared: SharedStore,
        local: MemoryLimitStore,
        *,
        policy: Policy,
        num_gateways: int,
        on_change: Callable[[bool], None],
        sums: Callable[[], Awaitable[Mapping[str, int]]] | None = None,
    ) -> None:
        self._shared = shared
        self._local = local
        self.policy = policy
        self._num_gateways = num_gateways
        self._on_change = on_change
        self._watch: asyncio.Task[None] | None = None
        self._meters_seen: dict[str, int] = {}
        # Gives each meter's sum by the ledger: a store that has lost its data is filled from it.
        self._sums = sums
        # Charges to meters while the shared store was away, which it has not heard of.
        self._owed: dict[str, int] = {}
        # Sent and not answered, in order.
        self._unclear: deque[Demand | Settlement] = deque()
        # Leases taken locally are returned locally, whatever the shared store does meanwhile.
        self._local_leases: set[LeaseReturn] = set()
        self.is_up = True

    def start(self) -> None:
        """Begins to watch the shared store."""
        self._on_change(True)
        self._watch = asyncio.create_task(self._probe(), name="limit-store-probe")

    async def acquire(self, demand: Demand) -> Granted | LimitRefused:
        if self.is_up:
            try:
                outcome = await self._shared.acquire(demand)
            except StoreLostError as error:
                self._unclear.append(demand)
                self._lost(error)
            except asyncio.CancelledError:
                # The client left meanwhile.
                self._unclear.append(demand)
                raise
            else:
                if isinstance(outcome, Granted):
                    sums = zip(demand.meters, outcome.meter_sums, strict=True)
                    self._meters_seen.update((meter.key, used) for meter, used in sums)
                return outcome
        if self.policy == "closed":
            raise StoreLostError("the shared store is away")
        return await self._acquire_locally(demand)

    async def settle(self, settlement: Settlement) -> None:
        held_here = self._local_leases.intersection(settlement.leases)
        if held_here:
            self._local_leases -= held_here
            await self._local.settle(Settlement(leases=tuple(held_here)))
            remaining = tuple(lease for lease in settlement.leases if lease not in held_here)
            settlement = replace(settlement, leases=remaining)
        if self.is_up:
            try:
                await self._shared.settle(settlement)
            except StoreLostError as error:
                self._unclear.append(settlement)
                self._lost(error)
            else:
                return
        elif settlement.leases:
            # The stream is older than the loss, so its lease is the shared store's.
            self._unclear.append(settlement)
        else:
            for meter in settlement.meters:
                self._owe(meter)
        await self._local.settle(replace(settlement, leases=()))

    async def renew(self, leases: tuple[LeaseReturn, ...]) -> None:
        await self._local.renew(tuple(self._local_leases.intersection(leases)))
        there = tuple(lease for lease in leases if lease not in self._local_leases)
        if self.is_up and there:
            try:
                await self._shared.renew(there)
            except StoreLostError as error:
                self._lost(error)

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
        try:
            await self._pay()
        except StoreLostError as error:
            _log.error("limit store lost: %d operations were not repeated: %s", len(self._unclear), error)
        await self._shared.close()

    async def raise_meters(self, sums: Mapping[str, int]) -> None:
        if self.is_up:
            try:
                await self._shared.raise_meters(sums)
            except StoreLostError as error:
                self._lost(error)

    async def _acquire_locally(self, demand: Demand) -> Granted | LimitRefused:
        await self._local.raise_meters(
            {meter.key: self._share(self._meters_seen.get(meter.key, 0)) for meter in demand.meters}
        )
        shared_out = Demand(
            windows=tuple(replace(window, limit=self._share(window.limit)) for window in demand.windows),
            leases=tuple(replace(lease, limit=self._share(lease.limit)) for lease in demand.leases),
            meters=tuple(replace(meter, limit=self._share(meter.limit)) for meter in demand.meters),
            counted=demand.counted,
            age_ms=demand.age_ms,
        )
        outcome = await self._local.acquire(shared_out)
        if isinstance(outcome, Granted):
            self._local_leases.update(lease.given_back for lease in demand.leases)
            for meter, units in zip(demand.meters, outcome.meter_units, strict=True):
                self._owe(MeterChange(meter.key, meter.base + units * meter.unit_cost))
        return outcome

    def _share(self, limit: int) -> int:
        # Rounded up: a limit below the number of gateways still lets one request through each.
        return -(-limit // self._num_gateways)

    def _owe(self, change: MeterChange) -> None:
        self._owed[change.key] = self._owed.get(change.key, 0) + change.delta

    def _lost(self, error: StoreLostError) -> None:
        if self.is_up:
            self.is_up = False
            self._on_change(False)
            _log.error("limit store lost, policy %s applies: %s", self.policy, error)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_INTERVAL_S)
            try:
                await self._shared.ping()
                # Before `is_up`: charges that come while a payment is under way are owed as well.
                await self._pay()
                if not self.is_up:
                    await self._reconcile()
                    self.is_up = True
                    self._on_change(True)
                    _log.warning("limit store found again")
            except StoreLostError as error:
                self._lost(error)

    async def _pay(self) -> None:
        """Repeats, or takes back, what is unclear, and pays what is owed."""
        while self._unclear or self._owed:
            if self._owed:
                owed, self._owed = self._owed, {}
                changes = tuple(MeterChange(key, delta) for key, delta in owed.items() if delta)
                self._unclear.append(Settlement(meters=changes))
            operation = self._unclear[0]
            if isinstance(operation, Settlement):
                await self._shared.settle(operation)
            else:
                await self._shared.take_back(operation)
            self._unclear.popleft()

    async def _reconcile(self) -> None:
        """The store may have come back without its data: meters hold at least what the ledger has."""
        if self._sums is not None and (sums := await self._sums()):
            await self._shared.raise_meters(sums)
