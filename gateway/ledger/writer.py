"""Writes finished requests on a thread of its own, in batches."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from typing import Any

import msgspec
from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from gateway.config import LedgerConfig
from gateway.ledger.tables import REQUESTS
from gateway.limits.prices import NANOS_PER_UNIT, Prices
from gateway.pipeline.ports import FinishedRequest
from observability.emit import names
from observability.emit.metrics import Metrics

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
# How long the process waits for the last entries to be written.
_LAST_WRITE_S = 10.0
# Of one statement; databases have limits.
_MAX_PARAMETERS = 1000


class LedgerWriter:
    """Takes entries without waiting; a thread writes them.

    An entry is in the database at most `flush_interval_s` plus the time of one write after `record`: that is
    what a SIGKILL loses. A database that is away is tried again every second; beyond `max_waiting_entries`
    the oldest entries are dropped, which is logged; so is an entry that the database does not take.
    """

    def __init__(self, engine: Engine, prices: Prices, config: LedgerConfig, metrics: Metrics) -> None:
        self._engine = engine
        self._prices = prices
        self._config = config
        self._metrics = metrics
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._num_dropped = 0
        metrics.set_function(names.LEDGER_PENDING, lambda: float(len(self._waiting)))
        self._thread = threading.Thread(target=self._write_forever, name="ledger", daemon=True)
        self._thread.start()

    def record(self, request: FinishedRequest) -> None:
        """Queues one entry; called from the event loop."""
        row = self._row(request)
        cost = row["cost_nanos"] / NANOS_PER_UNIT
        self._metrics.add(names.COST, cost, tier=request.tier, tenant=request.tenant)
        with self._changed:
            self._waiting.append(row)
            if len(self._waiting) > self._config.max_waiting_entries:
                self._waiting.popleft()
                self._num_dropped += 1
            if len(self._waiting) in {1, self._config.flush_entries}:
                self._changed.notify()

    def close(self) -> None:
        """Writes what is waiting, if the database lets it, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=_LAST_WRITE_S)
        if self._thread.is_alive():
            _log.error("ledger: the database does not answer, entries that wait for it are lost")
        self._engine.dispose()

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self._changed.wait_for(self._is_due, self._config.flush_interval_s)
                batch = list(self._waiting)
                self._waiting.clear()
                closing = self._closing
            if batch and not self._write(batch):
                self._put_back(batch)
                if closing:
                    _log.error("ledger: %d entries are lost, the database cannot be written", len(batch))
                    return
                time.sleep(_RETRY_S)
            elif closing:
                return

    def _is_due(self) -> bool:
        return self._closing or len(self._waiting) >= self._config.flush_entries

    def _write(self, batch: list[dict[str, Any]]) -> bool:
        """Whether all of the batch is done with; False when it has to be tried again."""
        try:
            with self._engine.begin() as connection:
                connection.execute(insert(REQUESTS), batch)
        except IntegrityError as error:
            # A batch whose commit seemed to fail had been written after all.
            return self._write_missing(batch, error)
        except (DataError, ValueError, OverflowError) as error:
            # The database will never take one of them, which must not keep the others from it.
            return self._write_halves(batch, error)
        except SQLAlchemyError as error:
            _log.error("ledger: cannot write %d entries, will retry: %s", len(batch), error)
            return False
        return True

    def _write_halves(self, batch: list[dict[str, Any]], error: Exception) -> bool:
        if len(batch) == 1:
            self._num_dropped += 1
            _log.error("ledger: an entry is dropped, the database refuses it: %s", error)
            return True
        middle = len(batch) // 2
        return self._write(batch[:middle]) and self._write(batch[middle:])

    def _write_missing(self, batch: list[dict[str, Any]], refusal: Exception) -> bool:
        there: set[str] = set()
        try:
            with self._engine.connect() as connection:
                for first in range(0, len(batch), _MAX_PARAMETERS):
                    ids = [row["entry_id"] for row in batch[first : first + _MAX_PARAMETERS]]
                    there |= set(
                        connection.scalars(select(REQUESTS.c.entry_id).where(REQUESTS.c.entry_id.in_(ids)))
                    )
        except SQLAlchemyError as error:
            _log.error("ledger: cannot write %d entries, will retry: %s", len(batch), error)
            return False
        missing = [row for row in batch if row["entry_id"] not in there]
        if len(missing) == len(batch):
            return self._write_halves(batch, refusal)
        return not missing or self._write(missing)

    def _put_back(self, batch: list[dict[str, Any]]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(batch))
            while len(self._waiting) > self._config.max_waiting_entries:
                self._waiting.popleft()
                self._num_dropped += 1
            if self._num_dropped:
                _log.error("ledger: %d entries were dropped so far", self._num_dropped)

    def _row(self, request: FinishedRequest) -> dict[str, Any]:
        cost_nanos = self._prices.cost_nanos(
            request.model,
            prompt_tokens=request.prompt_tokens,
            cached_prompt_tokens=request.cached_prompt_tokens,
            completion_tokens=request.completion_tokens + request.candidate_tokens,
        )
        return {
            **msgspec.structs.asdict(request),
            "entry_id": secrets.token_hex(16),
            "cost_nanos": cost_nanos,
            "labels": msgspec.json.encode(dict(request.labels)).decode(),
        }
