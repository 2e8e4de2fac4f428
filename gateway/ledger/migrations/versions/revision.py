"""Version of the model that answered. What is older tells none apart."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, String

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Adds the column."""
    op.add_column("requests", Column("revision", String(128), nullable=False, server_default=""))
