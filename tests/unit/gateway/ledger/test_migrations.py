"""A ledger of an earlier version is one of the present after a start; what it holds is kept."""

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

from gateway.ledger.migrations import VERSION_TABLE, migrate
from gateway.ledger.tables import REQUESTS, open_ledger
from runtime.errors import ConfigError

from .test_writer import finished, writer

NUM_PROCESSES = 4

# A step that a later version could have.
STEP = """
from alembic import op
from sqlalchemy import Column, Integer

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("requests", Column("later", Integer, nullable=False, server_default="7"))
"""


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


def further(folder: Path) -> str:
    """A folder with one step more than the program has."""
    steps = folder / "steps"
    steps.mkdir()
    (steps / "later.py").write_text(STEP)
    return str(steps)


def upgraded(url: str, steps: str) -> None:
    """Opens the ledger as the later version does."""
    engine = create_engine(url)
    try:
        migrate(engine, REQUESTS.metadata, further_steps=steps)
    finally:
        engine.dispose()


def shape(url: str) -> tuple[set[str], set[str]]:
    """Its tables, and the columns of the one."""
    engine = create_engine(url)
    found = inspect(engine)
    columns = {column["name"] for column in found.get_columns("requests")}
    tables = set(found.get_table_names())
    engine.dispose()
    return tables, columns


def test_an_older_ledger_keeps_what_it_has_and_takes_what_is_new(url: str, tmp_path: Path) -> None:
    ledger = writer(url)
    ledger.record(finished("old"))
    ledger.close()
    upgraded(url, further(tmp_path))
    assert "later" in shape(url)[1]
    engine = create_engine(url)
    with engine.connect() as connection:
        found = connection.execute(text("SELECT request_id, candidate_tokens, later FROM requests")).all()
    engine.dispose()
    assert [tuple(row) for row in found] == [("old", 7, 7)]


def test_a_new_ledger_is_what_the_program_means(url: str) -> None:
    engine = open_ledger(url)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, REQUESTS.metadata) == []
    engine.dispose()


def test_a_table_that_is_no_ledger_is_left_alone(url: str) -> None:
    run(url, "CREATE TABLE requests (anything INTEGER)")
    before = shape(url)
    with pytest.raises(ConfigError, match=r"gateway\.ledger\.url: .* no ledger .* name another database"):
        open_ledger(url)
    assert shape(url) == before


def _open(url: str, steps: str, together: Barrier, told: Queue[str]) -> None:
    together.wait()
    try:
        upgraded(url, steps)
    except ConfigError as error:
        told.put(str(error))
    else:
        told.put("")


@pytest.mark.parametrize("is_there", [False, True])
def test_gateways_that_start_at_once_make_each_step_once(url: str, is_there: bool, tmp_path: Path) -> None:
    if is_there:
        open_ledger(url).dispose()
    # Not forked: a lock that another thread of this process holds would stay locked there.
    context = multiprocessing.get_context("spawn")
    together, told = context.Barrier(NUM_PROCESSES), context.Queue()
    steps = further(tmp_path)
    processes = [
        context.Process(target=_open, args=(url, steps, together, told)) for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    assert [told.get() for _ in processes] == [""] * NUM_PROCESSES
    for process in processes:
        process.join()
    assert ("later" in shape(url)[1]) == is_there


def test_a_newer_ledger_is_refused_and_left_alone(url: str) -> None:
    open_ledger(url).dispose()
    run(url, f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    before = shape(url)
    with pytest.raises(
        ConfigError, match=r"gateway\.ledger\.url: .* newer version \(9999\) .* start gateways"
    ):
        open_ledger(url)
    assert shape(url) == before


def test_a_step_that_fails_leaves_the_ledger_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    open_ledger(url).dispose()
    before, steps = shape(url), further(tmp_path)

    def add_and_fail(*arguments: Any, **options: Any) -> None:
        add_column(*arguments, **options)
        raise ArithmeticError

    add_column = op.add_column
    with monkeypatch.context() as patch:
        patch.setattr(op, "add_column", add_and_fail)
        with pytest.raises(ArithmeticError):
            upgraded(url, steps)
    assert shape(url) == before
    upgraded(url, steps)
    assert "later" in shape(url)[1]
