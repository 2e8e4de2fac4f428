"""Tokens of candidates and beams that were computed and not returned. What is older has none.

Ledgers of that time have no number of a version.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer, inspect

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Adds the column where it is not there: for a while gateways made it, or asked for it."""
    there = {column["name"] for column in inspect(op.get_bind()).get_columns("requests")}
    if "candidate_tokens" not in there:
        op.add_column("requests", Column("candidate_tokens", Integer, nullable=False, server_default="0"))
