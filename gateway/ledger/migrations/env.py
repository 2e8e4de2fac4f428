"""Run by Alembic, with the connection of `migrate`, whose transaction all steps are in."""

from __future__ import annotations

from alembic import context

from gateway.ledger.migrations import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
