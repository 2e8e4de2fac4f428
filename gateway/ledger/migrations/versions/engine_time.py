"""What engines spent on a request, by which path, and what that cost. What is older has none."""

from __future__ import annotations

from alembic import op
from sqlalchemy import BigInteger, Column, Float, Integer, String

revision = "0004"
down_revision = "0003"

_TEXTS = {"client_request_id": 128, "guided": 16, "adapter": 256, "path": 80}
_SECONDS = ("engine_prefill_s", "engine_decode_s", "engine_speculative_waste_s", "engine_recompute_s")


def upgrade() -> None:
    """Adds the columns."""
    for name, length in _TEXTS.items():
        op.add_column("requests", Column(name, String(length), nullable=False, server_default=""))
    op.add_column("requests", Column("num_retries", Integer, nullable=False, server_default="0"))
    for name in _SECONDS:
        op.add_column("requests", Column(name, Float, nullable=False, server_default="0"))
    op.add_column("requests", Column("engine_cost_nanos", BigInteger, nullable=False, server_default="0"))
