"""Keeps a gateway's routes as a rollout says, without asking the database for any request."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from functools import partial

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gateway.config import GatewayConfig
from gateway.models.catalog import Catalog
from gateway.models.route_store import RouteWeights, open_route_store, read_weights
from gateway.models.routes import SetRoute
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)
# How long a gateway that starts waits for the first answer of the database.
_FIRST_READ_S = 5.0


class RouteWatch:
    """Reads what rollouts have set at every interval while the file has `[routes]`; `run` until cancelled.

    A change is in force after at most one interval and one read. What was read holds while the database is
    away, but for its dead-man interval, which this gateway's own clock measures from the last sign of life.
    """

    def __init__(
        self,
        config: GatewayConfig,
        catalog: Catalog,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = config.rollout.url or config.ledger.url
        self._interval_s = config.rollout.interval_s
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock
        self._engine: Engine | None = None
        # Heartbeat of each alias whose rollout runs, and when it was seen first.
        self._seen: dict[str, tuple[int, float]] = {}
        # Pairs of alias and model that metrics tell of.
        self._told: set[tuple[str, str]] = set()

    async def start(self) -> None:
        """Reads once before requests come, if the database answers soon."""
        try:
            await asyncio.wait_for(self.refresh(), _FIRST_READ_S)
        except TimeoutError:
            _log.error("routes: the database of rollouts does not answer; the file's weights hold")

    async def run(self) -> None:
        """Follows the database."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Takes what the database says now. One that cannot be read changes nothing, and is logged."""
        if self._url and self._catalog.models.routes:
            try:
                self.take(await asyncio.to_thread(self._read))
            except (SQLAlchemyError, ConfigError) as error:
                _log.error("routes: what rollouts have set cannot be read: %s", error)
        self._tell()

    def close(self) -> None:
        """Releases connections."""
        if self._engine is not None:
            self._engine.dispose()

    def take(self, found: list[RouteWeights]) -> None:
        """Puts weights in force."""
        now_s = self._clock()
        running = {each.alias: each for each in found if each.is_running}
        for alias in self._seen.keys() - running.keys():
            del self._seen[alias]
            self._metrics.remove(names.ROLLOUT_SILENCE, alias=alias)
        for alias, each in running.items():
            before = self._seen.get(alias)
            if before is None:
                self._metrics.set_function(
                    names.ROLLOUT_SILENCE, partial(self._silence_s, alias), alias=alias
                )
            if before is None or before[0] != each.heartbeat:
                self._seen[alias] = (each.heartbeat, now_s)
        self._catalog.set_routes({each.alias: self._route(each) for each in found})

    def _route(self, each: RouteWeights) -> SetRoute:
        mortal = each.is_running and each.dead_man_s > 0
        ends_s = self._seen[each.alias][1] + each.dead_man_s if mortal else math.inf
        return SetRoute(each.weights, each.without, each.configured, ends_s)

    def _silence_s(self, alias: str) -> float:
        return self._clock() - self._seen[alias][1] if alias in self._seen else 0.0

    def _read(self) -> list[RouteWeights]:
        if self._engine is None:
            self._engine = open_route_store(self._url)
        with self._engine.connect() as connection:
            return read_weights(connection)

    def _tell(self) -> None:
        """What is in force, so that others see whether this gateway follows, and who could answer."""
        told = set[tuple[str, str]]()
        for alias in self._catalog.models.routes:
            weights = self._catalog.route(alias) or {}
            whole = sum(weights.values())
            for model, weight in weights.items():
                labels = {"alias": alias, "model": model}
                self._metrics.set(names.ROUTE_SHARE, weight / whole, **labels)
                self._metrics.set(names.ROUTE_ENGINES, self._catalog.num_engines(model), **labels)
                told.add((alias, model))
        for alias, model in self._told - told:
            for metric in (names.ROUTE_SHARE, names.ROUTE_ENGINES):
                self._metrics.remove(metric, alias=alias, model=model)
        self._told = told
