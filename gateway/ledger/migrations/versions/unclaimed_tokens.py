"""Tokens that were computed for a gateway that was gone. What is older has none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Integer

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("requests", Column("unclaimed_tokens", Integer, nullable=False, server_default="0"))
