"""The tables of files and batches. Every key begins with the tenant."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Boolean, Column, Engine, Integer, LargeBinary, MetaData, String, Table

from gateway.database import open_database

# Longest id that is looked for; those that are given out are shorter.
MAX_ID = 64
MAX_FILENAME = 256

_METADATA = MetaData()


def _keys() -> tuple[Column[Any], ...]:
    return Column("tenant", String(63), primary_key=True), Column("id", String(MAX_ID), primary_key=True)


FILES = Table(
    "batch_files",
    _METADATA,
    *_keys(),
    Column("purpose", String(32), nullable=False),
    Column("filename", String(MAX_FILENAME), nullable=False),
    # As the client sees it; encrypted it is more.
    Column("num_bytes", BigInteger, nullable=False),
    Column("is_sealed", Boolean, nullable=False),
    Column("created_unix_ms", BigInteger, nullable=False, index=True),
    # 0 where it is kept until it is deleted.
    Column("expires_unix_ms", BigInteger, nullable=False, index=True),
)

BATCHES = Table(
    "batches",
    _METADATA,
    *_keys(),
    # The API that it was created by.
    Column("api", String(16), nullable=False),
    Column("input_file_id", String(MAX_ID), nullable=False),
    Column("is_open", Integer, nullable=False, index=True),
    Column("created_unix_ms", BigInteger, nullable=False, index=True),
    # 0 until somebody asks for it.
    Column("cancelled_unix_s", BigInteger, nullable=False),
    # Who runs it, and until when without a sign of life.
    Column("owner", String(MAX_ID), nullable=False),
    Column("lease_until_unix_ms", BigInteger, nullable=False),
    # JSON of a RequestBatch, encrypted where there is a key. Whoever runs it writes it, and nobody else.
    Column("body", LargeBinary, nullable=False),
)


def open_tables(url: str) -> Engine:
    """The database of files and batches; raises ConfigError naming gateway.batches.url."""
    return open_database(url, _METADATA.create_all, key="gateway.batches.url")
