"""The same ledger and key store on a real PostgreSQL, where one is installed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import text

from gateway.auth.key_store import KeyStore
from gateway.config import KeyEntry
from gateway.ledger.tables import open_ledger
from gateway.ledger.usage import DIMENSIONS, usage

from .test_writer import finished, rows, writer


def test_ledger(postgres_url: str) -> None:
    ledger = writer(postgres_url)
    for name in ("r1", "r2"):
        ledger.record(finished(name))
    batch = [ledger._row(finished("r3"))]
    assert ledger._write(batch)
    assert ledger._write([*batch, ledger._row(finished("r4"))])
    ledger.close()
    engine = open_ledger(postgres_url)
    assert [row["request_id"] for row in rows(engine)] == ["r1", "r2", "r3", "r4"]
    for name in DIMENSIONS:
        (row,) = usage(engine, [name], tenant="acme")
        assert (row.numbers["num_requests"], row.numbers["completion_tokens"]) == (4, 40)
    engine.dispose()


def test_entry_that_the_database_never_takes_keeps_no_other_from_it(postgres_url: str) -> None:
    ledger = writer(postgres_url)
    good, bad, last = (ledger._row(finished(name)) for name in ("good", "bad", "last"))
    wrong: list[dict[str, Any]] = [{"key_id": "k" * 129}, {"key_id": "k\0"}, {"prompt_tokens": 2**40}]
    never = [{**bad, **field, "entry_id": str(index)} for index, field in enumerate(wrong)]
    assert ledger._write([good, *never, last])
    ledger.close()
    engine = open_ledger(postgres_url)
    written = {row["request_id"] for row in rows(engine)}
    engine.dispose()
    assert {"good", "last"} <= written
    assert "bad" not in written


def test_keys(postgres_url: str) -> None:
    store = KeyStore(postgres_url)
    assert store.revision() == 0
    store.create(KeyEntry(id="one", tenant="acme", hash="", monthly_tokens=5))
    store.rotate("one", 3600)
    store.revoke("one")
    assert [(entry.id, entry.disabled, entry.monthly_tokens) for entry in store.entries()] == [
        ("one", True, 5)
    ] * 2
    assert store.revision() == 3
    store.close()


def test_change_that_is_committed_after_a_later_one_is_seen(postgres_url: str) -> None:
    store, database = KeyStore(postgres_url), open_ledger(postgres_url)
    change = text("INSERT INTO key_changes (changed_unix_s) VALUES (1)")
    before = store.revision()
    with database.begin() as slow:
        slow.execute(change)
        with database.begin() as fast:
            fast.execute(change)
        seen = store.revision()
        assert seen != before
    assert store.revision() != seen
    store.close()
    database.dispose()
