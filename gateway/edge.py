"""Puts the edge together: keys, tiers, limits, ledger and what Envoy asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack

from envoy_api.service.ratelimit.v3 import rls_pb2_grpc
from sqlalchemy.exc import SQLAlchemyError

from gateway.auth.authorizer import Authorizer
from gateway.auth.directory import KeyDirectory
from gateway.auth.key_store import KeyStore
from gateway.auth.key_watch import KeyWatch
from gateway.config import LedgerConfig, LimitsConfig
from gateway.intake.refusals import Refusals
from gateway.ledger.tables import open_ledger
from gateway.ledger.writer import LedgerWriter
from gateway.limits.counter import RequestCounter, RequestLimiter
from gateway.limits.limiter import Charges, Reservation, TokenLimiter
from gateway.limits.prices import Prices
from gateway.limits.redis_store import RedisLimitStore
from gateway.limits.resilient import ResilientLimitStore
from gateway.limits.servicer import RateLimitServicer
from gateway.limits.store import LimitStore, MemoryLimitStore
from gateway.pipeline.ports import FinishedRequest, Ledger, OpenEntry, Unkept
from gateway.settings import Settings, priced
from gateway.tiers import Tiers
from gateway.types.error_form import ErrorForms
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.deferred import Deferred
from runtime.server import GrpcServer

_log = logging.getLogger(__name__)
# How often this gateway looks for journals of others that are gone: the next one to start may be far away.
_RECOVERY_INTERVAL_S = 2.0


class Edge:
    """Everything about who may ask for how much. Started before the faces, closed after them."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        metrics: Metrics,
        refusals: Refusals,
        error_forms: ErrorForms,
    ) -> None:
        self.tiers = Tiers(settings)
        self.directory = KeyDirectory(settings)
        self._key_watch = _key_watch(settings, self.directory)
        self.prices = Prices(priced(settings.gateway, settings.models))
        self.ledger = ledger(settings.gateway.ledger, self.prices, metrics)
        # Runs what records requests (spans, counters, ledger) after their answers have left.
        self.deferred = Deferred()
        self._store = limit_store(settings.gateway.limits, metrics, self._month_sums)
        self.limiter = TokenLimiter(self._store, self.directory, self.prices, settings.gateway.limits)
        # Asked by the HTTP face, for itself and for Envoy.
        self.authorizer = Authorizer(
            self.directory,
            self.tiers,
            settings.security.secret(),
            telemetry,
            metrics,
            self.deferred,
            error_forms,
        )
        self.counter = RequestCounter(RequestLimiter(self._store, self.directory), telemetry, metrics)
        self._ratelimit = RateLimitServicer(self.counter, refusals.throttle, error_forms)
        self._recovery: asyncio.Task[None] | None = None

    def register(self, server: GrpcServer) -> None:
        """Adds the service that Envoy asks over gRPC."""
        server.add(
            rls_pb2_grpc.add_RateLimitServiceServicer_to_server,
            self._ratelimit,
            "envoy.service.ratelimit.v3.RateLimitService",
        )

    async def start(self) -> None:
        """Begins background work; needs the running loop that the servers use."""
        if isinstance(self._store, ResilientLimitStore):
            self._store.start()
        if isinstance(self.ledger, LedgerWriter):
            await self._recover(self.ledger)
            self._recovery = asyncio.create_task(self._keep_recovering(self.ledger), name="recover ledger")
        # A meter that lives in this process, or in a Redis that was lost, is not forgotten.
        await self._store.raise_meters(await self._month_sums())
        if self._key_watch is not None:
            await self._key_watch.start()
        self.limiter.start()

    async def close(self) -> None:
        """Settles what is in flight, writes what the ledger still holds, and releases connections. What one
        of them raises keeps no other from its end.
        """
        async with AsyncExitStack() as ends:
            # The last one first.
            if isinstance(self.ledger, LedgerWriter):
                ends.push_async_callback(asyncio.to_thread, self.ledger.close)
            ends.callback(self.deferred.flush)
            ends.push_async_callback(self._store.close)
            ends.push_async_callback(self.limiter.close)
            if self._recovery is not None:
                self._recovery.cancel()
                ends.push_async_callback(asyncio.wait, {self._recovery})
            if self._key_watch is not None:
                ends.push_async_callback(self._key_watch.close)

    async def _keep_recovering(self, ledger: LedgerWriter) -> None:
        while True:
            await asyncio.sleep(_RECOVERY_INTERVAL_S)
            try:
                if await self._recover(ledger):
                    await self._store.raise_meters(await self._month_sums())
                await asyncio.to_thread(ledger.unclaimed.write)
            except (OSError, SQLAlchemyError) as error:
                _log.error("ledger: what others have left cannot be taken in, will retry: %s", error)

    async def _recover(self, ledger: LedgerWriter) -> bool:
        """Takes in what gateways that are gone have left, if there is something. What they held of the shared
        limits is given back, but for what was used.
        """
        found = await asyncio.to_thread(ledger.recover)
        for left in found:
            for each in left.kept:
                if each.charges is not None and isinstance(self._store, ResilientLimitStore):
                    await Reservation(self.limiter, each.charges).settle(
                        each.request.prompt_tokens,
                        each.request.billed_tokens,
                        cached_prompt_tokens=each.request.cached_prompt_tokens,
                    )
            left.remove()
        return bool(found)

    async def _month_sums(self) -> dict[str, int]:
        return (
            await asyncio.to_thread(self.ledger.month_sums) if isinstance(self.ledger, LedgerWriter) else {}
        )

    def note_unclaimed(self, computed: Mapping[str, int]) -> None:
        """What an engine has computed for gateways that are gone, by entries of the ledger."""
        if isinstance(self.ledger, LedgerWriter):
            self.ledger.unclaimed.note(computed)

    def limit_store_health(self) -> str:
        """How the shared limit store is; "" where there is none."""
        if not isinstance(self._store, ResilientLimitStore):
            return ""
        return "up" if self._store.is_up else f"lost, policy {self._store.policy} applies"


class NoLedger:
    """Keeps nothing; for deployments that set `gateway.ledger.url` to ""."""

    def begin(self, request: FinishedRequest, charges: Charges) -> OpenEntry:
        """Drops it."""
        return Unkept(request.entry_id)

    def record(self, request: FinishedRequest) -> None:
        """Drops it."""


def ledger(config: LedgerConfig, prices: Prices, metrics: Metrics) -> Ledger:
    """The ledger that the configuration names; raises ConfigError when its database cannot be opened."""
    if not config.url:
        return NoLedger()
    return LedgerWriter(open_ledger(config.url), prices, config, metrics)


def _key_watch(settings: Settings, directory: KeyDirectory) -> KeyWatch | None:
    keys = settings.keys
    if not keys.store:
        return None
    return KeyWatch(
        KeyStore(keys.store),
        directory,
        interval_s=keys.refresh_interval_s,
        max_staleness_s=keys.max_staleness_s,
    )


def limit_store(
    config: LimitsConfig, metrics: Metrics, sums: Callable[[], Awaitable[dict[str, int]]]
) -> LimitStore:
    """The store that the configuration names; `sums` are what monthly meters ought to hold at least."""
    local = MemoryLimitStore(lease_ttl_s=config.lease_ttl_s)
    if not config.store:
        return local
    shared = RedisLimitStore(
        config.store, lease_ttl_s=config.lease_ttl_s, timeout_s=config.store_timeout_ms / 1000
    )
    return ResilientLimitStore(
        shared,
        local,
        policy=config.on_store_loss,
        num_gateways=config.expected_gateways,
        on_change=lambda is_up: metrics.set(names.LIMIT_STORE_UP, float(is_up)),
        sums=sums,
    )
