"""Ledgers of every earlier version are those of the present one after a start; what they hold is kept."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine, inspect, text

from gateway.ledger.migrations import VERSION_TABLE
from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.errors import ConfigError

from .test_writer import finished, rows, writer

NUM_PROCESSES = 4

# As the programs of each version have made it.
FIRST = """
CREATE TABLE requests (
    entry_id VARCHAR(32) NOT NULL, request_id VARCHAR(128) NOT NULL, ended_unix_ms BIGINT NOT NULL,
    tenant VARCHAR(63) NOT NULL, key_id VARCHAR(128) NOT NULL, tier VARCHAR(63) NOT NULL,
    model VARCHAR(256) NOT NULL, face VARCHAR(8) NOT NULL, outcome VARCHAR(64) NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    reasoning_tokens INTEGER NOT NULL, speculative_waste_tokens INTEGER NOT NULL,
    recomputed_tokens INTEGER NOT NULL, num_choices INTEGER NOT NULL, num_preemptions INTEGER NOT NULL,
    num_engines_lost INTEGER NOT NULL, grammar_ms FLOAT NOT NULL, queue_ms FLOAT NOT NULL, ttft_ms FLOAT,
    duration_ms FLOAT NOT NULL, cost_nanos BIGINT NOT NULL, labels TEXT NOT NULL,
    PRIMARY KEY (entry_id)
);
CREATE INDEX ix_requests_ended_unix_ms ON requests (ended_unix_ms);
CREATE INDEX ix_requests_request_id ON requests (request_id);
CREATE INDEX ix_requests_tenant ON requests (tenant);
"""
# The next one made it with the column, or asked its operator to add it.
MADE = FIRST.replace("reasoning_tokens", "candidate_tokens INTEGER NOT NULL, reasoning_tokens")
ADDED = f"{FIRST}ALTER TABLE requests ADD COLUMN candidate_tokens INTEGER NOT NULL DEFAULT 0;\n"
# Then steps had numbers.
NUMBERED = f"""{ADDED}
CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL PRIMARY KEY);
INSERT INTO {VERSION_TABLE} VALUES ('0001');
"""
VERSIONS = {"first": FIRST, "made": MADE, "added": ADDED, "numbered": NUMBERED}


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/ledger.sqlite"
        return
    url = request.getfixturevalue("postgres_url")
    yield url
    run(url, f"DROP TABLE IF EXISTS requests; DROP TABLE IF EXISTS {VERSION_TABLE};")


def run(url: str, statements: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        for statement in filter(None, map(str.strip, statements.split(";"))):
            connection.execute(text(statement))
    engine.dispose()


def make(url: str, version: str) -> None:
    """A ledger as that version left it, with one row."""
    run(url, VERSIONS[version])
    request = finished("old")
    there = shape(url)[1]
    values = {column.name: getattr(request, column.name, 0) for column in REQUESTS.c if column.name in there}
    values |= {"labels": "{}", "cost_nanos": 5}
    columns, places = ", ".join(values), ", ".join(f":{name}" for name in values)
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO requests ({columns}) VALUES ({places})"), values)
    engine.dispose()


def shape(url: str) -> tuple[set[str], set[str]]:
    """Its tables, and the columns of the one."""
    engine = create_engine(url)
    found = inspect(engine)
    columns = {column["name"] for column in found.get_columns("requests")}
    tables = set(found.get_table_names())
    engine.dispose()
    return tables, columns


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_ledger_keeps_what_it_has_and_takes_what_is_new(url: str, version: str) -> None:
    make(url, version)
    for request_id in ("new", "newer"):
        ledger = writer(url)
        ledger.record(finished(request_id))
        ledger.close()
    engine = open_ledger(url)
    candidates = 0 if version == "first" else 7
    assert [(row["request_id"], row["candidate_tokens"]) for row in rows(engine)] == [
        ("new", 7),
        ("newer", 7),
        ("old", candidates),
    ]
    engine.dispose()


@pytest.mark.parametrize("version", ["", *VERSIONS])
def test_steps_make_what_the_program_means(url: str, version: str) -> None:
    if version:
        make(url, version)
    engine = open_ledger(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, REQUESTS.metadata) == []
    engine.dispose()


def _open(url: str, together: Barrier, told: Queue[str]) -> None:
    together.wait()
    try:
        open_ledger(url).dispose()
    except ConfigError as error:
        told.put(str(error))
    else:
        told.put("")


@pytest.mark.parametrize("version", ["", "first"])
def test_gateways_that_start_at_once_make_each_step_once(url: str, version: str) -> None:
    if version:
        make(url, version)
    # Not forked: a lock that another thread of this process holds would stay locked there.
    context = multiprocessing.get_context("spawn")
    together, told = context.Barrier(NUM_PROCESSES), context.Queue()
    processes = [context.Process(target=_open, args=(url, together, told)) for _ in range(NUM_PROCESSES)]
    for process in processes:
        process.start()
    assert [told.get() for _ in processes] == [""] * NUM_PROCESSES
    for process in processes:
        process.join()
    engine = open_ledger(url)
    assert len(rows(engine)) == bool(version)
    engine.dispose()


def test_a_newer_ledger_is_refused_and_left_alone(url: str) -> None:
    open_ledger(url).dispose()
    run(url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    before = shape(url)
    with pytest.raises(
        ConfigError, match=r"gateway\.ledger\.url: .* newer version \(9999\) .* start gateways"
    ):
        open_ledger(url)
    assert shape(url) == before


def test_a_step_that_fails_leaves_the_ledger_as_it_was(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make(url, "first")
    before = shape(url)

    def add_and_fail(*arguments: Any, **options: Any) -> None:
        add_column(*arguments, **options)
        raise ArithmeticError

    add_column = op.add_column
    with monkeypatch.context() as patch:
        patch.setattr(op, "add_column", add_and_fail)
        with pytest.raises(ArithmeticError):
            open_ledger(url)
    assert shape(url) == before
    engine = open_ledger(url)
    assert [row["request_id"] for row in rows(engine)] == ["old"]
    engine.dispose()
