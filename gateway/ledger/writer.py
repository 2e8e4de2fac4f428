"""Writes finished requests on a thread of its own, in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from contract.outputs import FinishReason
from gateway.config import LedgerConfig
from gateway.database import database_url
from gateway.ledger.journal import Journal, Left, left_behind
from gateway.ledger.tables import REQUESTS
from gateway.ledger.unclaimed import UnclaimedTokens
from gateway.ledger.usage import UsageRow, month_sums, usage
from gateway.limits.limiter import Charges
from gateway.limits.prices import NANOS_PER_UNIT, Prices
from gateway.limits.store import month_of
from gateway.pipeline.ports import INTERRUPTED, FinishedRequest, OpenEntry, Unkept
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)
_RETRY_S = 1.0
# How long the process waits for the last entries to be written.
_LAST_WRITE_S = 10.0
# Most parameters in one statement; databases have limits.
_MAX_PARAMETERS = 1000
# Outcomes of requests whose choices have ended.
_ENDS = frozenset(reason.name.lower() for reason in FinishReason)


def journal_folder(config: LedgerConfig) -> Path | None:
    """Where gateways keep what is open; None keeps it nowhere."""
    if config.journal:
        return Path(config.journal)
    url = database_url(config.url)
    is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    return Path(f"{url.database}-open") if is_file else None


def open_journal(folder: Path) -> Journal:
    """A journal of this process; raises ConfigError naming gateway.ledger.journal."""
    try:
        return Journal(folder)
    except OSError as error:
        raise ConfigError(f"gateway.ledger.journal: {error}") from error


class LedgerWriter:
    """Takes entries without waiting; a thread writes them.

    An entry is in the database at most `flush_interval_s` plus the time of one write after `record`. Until
    then it is in a journal, as are requests that have not ended: `recover` writes what a killed process has
    left there. A database that is away is tried again every second; beyond `max_waiting_entries` the oldest
    entries are dropped, which is logged and counted; so is an entry that the database does not take.
    """

    def __init__(self, engine: Engine, prices: Prices, config: LedgerConfig, metrics: Metrics) -> None:
        self._engine = engine
        self._prices = prices
        self._config = config
        self._metrics = metrics
        self.unclaimed = UnclaimedTokens(engine)
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._is_failing = False
        metrics.set_function(names.LEDGER_PENDING, lambda: float(len(self._waiting)))
        for counter in (names.LEDGER_JOURNALS, names.LEDGER_RECOVERED, names.LEDGER_MISSING):
            metrics.begin(counter)
        self._folder = journal_folder(config)
        self._journal = None if self._folder is None else open_journal(self._folder)
        self._thread = threading.Thread(target=self._write_forever, name="ledger", daemon=True)
        self._thread.start()

    def begin(self, request: FinishedRequest, charges: Charges) -> OpenEntry:
        """Puts a request that is accepted into the journal; called from the event loop."""
        return Unkept(request.entry_id) if self._journal is None else self._journal.begin(request, charges)

    def record(self, request: FinishedRequest) -> None:
        """Queues one entry; called from the event loop."""
        row = self._row(request)
        cost = row["cost_nanos"] / NANOS_PER_UNIT
        self._metrics.add(names.COST, cost, tier=request.tier, tenant=request.tenant)
        if self._journal is not None:
            self._journal.end(request)
        with self._changed:
            self._waiting.append(row)
            self._drop_oldest()
            if len(self._waiting) in {1, self._config.flush_entries}:
                self._changed.notify()

    def month_sums(self) -> dict[str, int]:
        """What the meters of this month ought to hold at least; asks the database."""
        return month_sums(self._engine, month_of(time.time()))

    def usage(self, by: str, *, since_unix_ms: int, tenant: str) -> list[UsageRow]:
        """Sums of a tenant's requests since a moment by one dimension; asks the database."""
        return usage(self._engine, [by], since_unix_ms=since_unix_ms, tenant=tenant)

    def recover(self) -> list[Left]:
        """Writes what processes that are gone have left, and returns it with what they still hold of the
        limits; whoever has settled that removes it. What the database does not take now stays for the next
        time.
        """
        found: list[Left] = []
        if self._folder is None or self._journal is None:
            return found
        self._journal.make_room()
        for left in left_behind(self._folder):
            requests = [each.request for each in left.kept]
            if not self._write([self._row(request) for request in requests]):
                left.release()
                break
            found.append(left)
            num_interrupted = sum(request.outcome == INTERRUPTED for request in requests)
            self._metrics.add(names.LEDGER_JOURNALS)
            self._metrics.add(names.LEDGER_RECOVERED, num_interrupted, interrupted="true")
            self._metrics.add(names.LEDGER_RECOVERED, len(requests) - num_interrupted, interrupted="false")
            self._metrics.add(names.LEDGER_MISSING, left.num_missing, reason="killed")
            _log.warning(
                "ledger: a gateway was killed; %d requests are in its journal, %d of them interrupted; %d "
                "are missing",
                len(requests),
                num_interrupted,
                left.num_missing,
            )
        return found

    def close(self) -> None:
        """Writes what is waiting, if the database lets it, and ends the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout=_LAST_WRITE_S)
        if self._thread.is_alive():
            _log.error("ledger: the database does not answer, entries that wait for it are lost")
        if self._journal is not None:
            self._journal.close()
        self._engine.dispose()

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                self._changed.wait_for(self._is_due, self._config.flush_interval_s)
                batch = list(self._waiting)
                self._waiting.clear()
                closing = self._closing
            if self._write(batch):
                self._forget(batch)
                if self._is_failing:
                    self._is_failing = False
                    _log.warning("ledger: the database takes entries again, %d had waited", len(batch))
            else:
                self._is_failing = True
                self._put_back(batch)
                if closing:
                    _log.error("ledger: %d entries are lost, the database cannot be written", len(batch))
                    return
                time.sleep(_RETRY_S)
                continue
            if closing:
                return

    def _is_due(self) -> bool:
        return self._closing or len(self._waiting) >= self._config.flush_entries

    def _write(self, batch: list[dict[str, Any]]) -> bool:
        """Whether all of the batch is done with; False when it has to be tried again."""
        if not batch:
            return True
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
            self._metrics.add(names.LEDGER_MISSING, reason="refused")
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
            self._conclude([row for row in batch if row["entry_id"] in there])
        except SQLAlchemyError as error:
            _log.error("ledger: cannot write %d entries, will retry: %s", len(batch), error)
            return False
        missing = [row for row in batch if row["entry_id"] not in there]
        if len(missing) == len(batch):
            return self._write_halves(batch, refusal)
        return not missing or self._write(missing)

    def _conclude(self, rows: list[dict[str, Any]]) -> None:
        """Puts what has come to its end into the place of an earlier try that had not: a line of a batch that
        is computed again has the same row.
        """
        concluded = [row for row in rows if row["outcome"] in _ENDS]
        if concluded:
            with self._engine.begin() as connection:
                for row in concluded:
                    tried = (REQUESTS.c.entry_id == row["entry_id"], REQUESTS.c.outcome.not_in(_ENDS))
                    connection.execute(update(REQUESTS).where(*tried).values(row))

    def _put_back(self, batch: list[dict[str, Any]]) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(batch))
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        num_dropped = len(self._waiting) - self._config.max_waiting_entries
        if num_dropped > 0:
            self._forget([self._waiting.popleft() for _ in range(num_dropped)])
            self._metrics.add(names.LEDGER_MISSING, num_dropped, reason="waiting")
            _log.error("ledger: %d entries are dropped, more wait than may", num_dropped)

    def _forget(self, rows: list[dict[str, Any]]) -> None:
        if self._journal is not None:
            self._journal.forget([row["entry_id"] for row in rows])

    def _row(self, request: FinishedRequest) -> dict[str, Any]:
        cost_nanos = self._prices.cost_nanos(
            request.model,
            prompt_tokens=request.prompt_tokens,
            cached_prompt_tokens=request.cached_prompt_tokens,
            billed_tokens=request.billed_tokens,
        )
        row = msgspec.structs.asdict(request)
        spent = row.pop("engine_time")
        return {
            **row,
            **{f"engine_{name}": seconds for name, seconds in msgspec.structs.asdict(spent).items()},
            "cost_nanos": cost_nanos,
            "engine_cost_nanos": self._prices.engine_nanos(request.model, spent.total_s),
            "labels": msgspec.json.encode(dict(request.labels)).decode(),
        }
