"""Brings a ledger of any earlier version to the present one, once, however many gateways start on it.

A new ledger is made as it is meant now; an older one by steps, each a file in `versions`, in Alembic's form.
Gateways of the version before go on writing while a step is made, and after it: what it adds has a default,
and what they write is not taken away.
"""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, inspect

from runtime.errors import ConfigError

# Not alembic's default name: the database may have other tables, with versions of their own.
VERSION_TABLE = "ledger_version"

# The first statement of a transaction that makes steps: others wait for its end. PostgreSQL's number is any
# that nobody else locks.
_LOCKS = {"sqlite": "BEGIN IMMEDIATE", "postgresql": "SELECT pg_advisory_xact_lock(7213590164)"}


def migrate(database: Engine, tables: MetaData, *, further_steps: str = "") -> None:
    """Makes `tables`, or what they lack, in one transaction: one that fails leaves all as it was.

    Steps are those of `versions` and of the folder `further_steps`. Raises ConfigError for a ledger of a
    version that has no step here, and for another database.
    """
    lock = _LOCKS.get(database.dialect.name)
    if lock is None:
        raise ConfigError(
            f"gateway.ledger.url: ledgers are kept in SQLite or PostgreSQL, not in {database.dialect.name}"
        )
    config = Config()
    config.set_main_option("script_location", "gateway.ledger:migrations")
    if further_steps:
        config.set_main_option("path_separator", "newline")
        config.set_main_option("version_locations", f"gateway.ledger:migrations/versions\n{further_steps}")
    steps = ScriptDirectory.from_config(config)
    with database.connect() as connection:
        if not _is_behind(connection, steps):
            return
    with database.begin() as connection:
        connection.exec_driver_sql(lock)
        # Another gateway may have been first.
        if _is_behind(connection, steps):
            context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
            is_new = context.get_current_revision() is None
            if is_new and set(tables.tables) & set(inspect(connection).get_table_names()):
                raise ConfigError(
                    "gateway.ledger.url: the database has a table named requests that is no ledger of this "
                    "program, or one from before its first version; name another database"
                )
            tables.create_all(connection)
            config.attributes["connection"] = connection
            (command.stamp if is_new else command.upgrade)(config, "head")


def _is_behind(connection: Connection, steps: ScriptDirectory) -> bool:
    context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
    there, newest = context.get_current_revision(), steps.get_current_head()
    if there is not None and there not in {step.revision for step in steps.walk_revisions()}:
        raise ConfigError(
            f"gateway.ledger.url: the ledger is of a newer version ({there}) than this program ({newest}); "
            "start gateways of the version that has written it, or name another ledger"
        )
    return there != newest
