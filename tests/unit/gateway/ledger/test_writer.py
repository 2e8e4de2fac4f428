"""Entries reach the database, whatever happens to it meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from gateway.config import LedgerConfig, PriceConfig
from gateway.ledger.tables import REQUESTS, open_ledger
from gateway.ledger.writer import LedgerWriter
from gateway.limits.prices import Prices
from gateway.pipeline.ports import FinishedRequest
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.errors import ConfigError

PRICES = Prices({"*": PriceConfig(prompt=1.0, cached_prompt=0.1, completion=2.0, engine_hour=7200.0)})


def finished(request_id: str, **fields: Any) -> FinishedRequest:
    values: dict[str, Any] = {
        "entry_id": secrets.token_hex(16),
        "request_id": request_id,
        "ended_unix_ms": 1_790_000_000_500,
        "tenant": "acme",
        "key_id": "k",
        "tier": "standard",
        "model": "m",
        "face": "http",
        "outcome": "stop",
        "prompt_tokens": 100,
        "cached_prompt_tokens": 60,
        "completion_tokens": 10,
        "candidate_tokens": 7,
        "reasoning_tokens": 0,
        "num_choices": 1,
        "num_engines_lost": 0,
        "speculative_waste_tokens": 4,
        "recomputed_tokens": 3,
        "num_preemptions": 1,
        "grammar_ms": 1.0,
        "queue_ms": 20.0,
        "ttft_ms": 100.0,
        "duration_ms": 1500.0,
        "labels": {"team": "a"},
    }
    return FinishedRequest(**{**values, **fields})


def rows(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(select(REQUESTS).order_by(REQUESTS.c.request_id)).mappings())


def writer(url: str, **config: Any) -> LedgerWriter:
    return LedgerWriter(open_ledger(url), PRICES, LedgerConfig(url=url, **config), Metrics())


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/deep/ledger.sqlite"


def test_entries_that_are_missing_are_counted_from_0(url: str) -> None:
    metrics = Metrics()
    ledger = LedgerWriter(open_ledger(url), PRICES, LedgerConfig(url=url), metrics)
    ledger.close()
    for reason in ("killed", "waiting", "refused"):
        assert metrics.registry.get_sample_value(names.LEDGER_MISSING.name, {"reason": reason}) == 0


def test_entry_holds_what_the_request_used_and_cost(url: str) -> None:
    ledger = writer(url)
    ledger.record(finished("r1"))
    ledger.record(finished("r2", ttft_ms=None))
    ledger.close()
    first, second = rows(open_ledger(url))
    assert (first["tenant"], first["tier"], first["outcome"]) == ("acme", "standard", "stop")
    assert first["ended_unix_ms"] == 1_790_000_000_500
    assert (first["speculative_waste_tokens"], first["recomputed_tokens"]) == (4, 3)
    assert (first["queue_ms"], first["ttft_ms"], second["ttft_ms"]) == (20.0, 100.0, None)
    # 40 computed at 1, 60 cached at 0.1, 10 completed and 7 of candidates at 2 units a million.
    assert first["cost_nanos"] == 40_000 + 6_000 + 34_000
    assert first["labels"] == '{"team":"a"}'


def test_entries_are_written_without_being_asked_to(url: str) -> None:
    ledger = writer(url, flush_interval_s=0.01)
    ledger.record(finished("r1"))
    reader = open_ledger(url)
    while not rows(reader):
        threading.Event().wait(0.005)
    ledger.close()


def test_many_threads_lose_nothing(url: str) -> None:
    ledger = writer(url, flush_interval_s=0.01, flush_entries=7)

    def record(name: str) -> None:
        for number in range(50):
            ledger.record(finished(f"{name}{number}"))

    threads = [threading.Thread(target=record, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ledger.close()
    assert len({row["request_id"] for row in rows(open_ledger(url))}) == 200


def test_database_that_is_away_is_tried_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.writer._RETRY_S", 0.01)
    database = open_ledger(url)
    with database.begin() as connection:
        connection.execute(text("ALTER TABLE requests RENAME TO away"))
    ledger = LedgerWriter(database, PRICES, LedgerConfig(url=url, flush_interval_s=0.01), Metrics())
    ledger.record(finished("r1"))
    # The writer has taken the entry, failed and put it back.
    while not ledger._waiting:
        threading.Event().wait(0.002)
    with database.begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO requests"))
    ledger.close()
    assert [row["request_id"] for row in rows(open_ledger(url))] == ["r1"]


def test_batch_that_was_written_after_all_is_not_written_twice(url: str) -> None:
    ledger = writer(url)
    batch = [ledger._row(finished(name)) for name in ("r1", "r2")]
    assert ledger._write(batch[:1])
    assert ledger._write(batch)
    ledger.close()
    assert [row["request_id"] for row in rows(open_ledger(url))] == ["r1", "r2"]


def _record_and_die(url: str) -> None:
    ledger = writer(url, flush_interval_s=0.05)
    for number in range(100):
        ledger.record(finished(f"r{number}"))
    # The window passes, nobody asks for a flush, and then comes a death without any chance of one.
    while len(rows(open_ledger(url))) < 100:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigkill_loses_nothing_beyond_the_window(url: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_record_and_die, args=(url,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert len(rows(open_ledger(url))) == 100


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("://nonsense", "gateway.ledger.url"),
        ("oracle-of-delphi://x", "gateway.ledger.url"),
        ("sqlite:////proc/nowhere/ledger.sqlite", "gateway.ledger.url"),
    ],
)
def test_unusable_url_is_a_configuration_error(bad: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_ledger(bad)


def test_a_request_that_is_computed_again_has_one_row_and_its_end_counts(url: str) -> None:
    """Under one id, in whatever order they come: what had not ended gives way, what has ended stays."""
    ledger = writer(url, flush_interval_s=0.01)
    for name, outcomes in (
        ("a", ["interrupted", "stop"]),
        ("b", ["QUEUE_LIMIT_EXCEEDED", "QUEUE_LIMIT_EXCEEDED", "length"]),
        ("c", ["stop", "interrupted"]),
        ("d", ["stop", "stop"]),
    ):
        for number, outcome in enumerate(outcomes, start=1):
            ledger.record(finished(name, entry_id=name * 32, outcome=outcome, completion_tokens=number))
    ledger.close()
    found = {row["request_id"]: (row["outcome"], row["completion_tokens"]) for row in rows(open_ledger(url))}
    assert found == {"a": ("stop", 2), "b": ("length", 3), "c": ("stop", 1), "d": ("stop", 1)}
