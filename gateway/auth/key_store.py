"""API keys in a database: created, listed, revoked and rotated by people, read by gateways.

A key is a name, an agreement and one or more secrets, of which only hashes are kept. A secret is shown once,
when it is made. Every change raises the revision, which is what gateways look at.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)

from gateway.auth.directory import hash_key
from gateway.auth.secret import new_secret
from gateway.config import KeyEntry
from gateway.database import open_database

_log = logging.getLogger(__name__)
_METADATA = MetaData()

_KEYS = Table(
    "keys",
    _METADATA,
    Column("id", String(63), primary_key=True),
    Column("created_unix_s", BigInteger, nullable=False),
    Column("revoked_unix_s", BigInteger),
    # The KeyEntry without its hash, as JSON.
    Column("agreement", Text, nullable=False),
)
_SECRETS = Table(
    "key_secrets",
    _METADATA,
    Column("hash", String(71), primary_key=True),
    Column("key_id", String(63), nullable=False, index=True),
    Column("expires_unix_s", BigInteger),
)
_CHANGES = Table(
    "key_changes",
    _METADATA,
    Column("revision", Integer, primary_key=True, autoincrement=True),
    Column("changed_unix_s", BigInteger, nullable=False),
)


class KeyStoreError(Exception):
    """The change cannot be made; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as listed: what was agreed, never the secret."""

    entry: KeyEntry
    created_unix_s: int
    revoked_unix_s: int | None
    num_secrets: int


class KeyStore:
    """One database of keys. Not for the event loop: every method waits for the database."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.time) -> None:
        self._engine = open_database(url, _METADATA.create_all, key="keys.store")
        self._clock = clock

    def close(self) -> None:
        """Releases connections."""
        self._engine.dispose()

    def revision(self) -> int:
        """How many changes are committed; 0 before the first.

        Not the latest one's number: of two that are made at once, the one with the lower number may be
        committed last, and a revocation must not be overlooked for that.
        """
        with self._engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(_CHANGES)) or 0

    def entries(self) -> list[KeyEntry]:
        """One entry for every secret that is not expired; revoked keys are `disabled`."""
        joined = select(_KEYS, _SECRETS.c.hash, _SECRETS.c.expires_unix_s.label("secret_expires")).join(
            _SECRETS, _SECRETS.c.key_id == _KEYS.c.id
        )
        with self._engine.connect() as connection:
            rows = connection.execute(joined.order_by(_KEYS.c.id)).all()
        now_s = self._clock()
        alive = (row for row in rows if row.secret_expires is None or row.secret_expires > now_s)
        return [entry for row in alive if (entry := self._readable(row)) is not None]

    def stored(self) -> list[StoredKey]:
        """All keys, revoked ones too, by name."""
        counts = dict[str, int]()
        with self._engine.connect() as connection:
            alive = _SECRETS.c.expires_unix_s.is_(None) | (_SECRETS.c.expires_unix_s > self._clock())
            grouped = select(_SECRETS.c.key_id, func.count()).where(alive).group_by(_SECRETS.c.key_id)
            for key_id, number in connection.execute(grouped):
                counts[key_id] = number
            rows = connection.execute(select(_KEYS).order_by(_KEYS.c.id)).all()
        return [
            StoredKey(
                self._entry(row.agreement, "", None, row.revoked_unix_s),
                row.created_unix_s,
                row.revoked_unix_s,
                counts.get(row.id, 0),
            )
            for row in rows
        ]

    def create(self, agreement: KeyEntry) -> str:
        """Stores a key under its id and returns its secret, which cannot be read again."""
        secret = new_secret()
        with self._engine.begin() as connection:
            if connection.scalar(select(_KEYS.c.id).where(_KEYS.c.id == agreement.id)) is not None:
                raise KeyStoreError(
                    f"there is a key {agreement.id} already; choose another --id, or rotate it"
                )
            connection.execute(
                insert(_KEYS).values(
                    id=agreement.id,
                    created_unix_s=int(self._clock()),
                    agreement=msgspec.json.encode(agreement).decode(),
                )
            )
            self._add_secret(connection, agreement.id, secret)
            self._changed(connection)
        return secret

    def revoke(self, key_id: str) -> None:
        """Refuses the key from now on; it stays listed."""
        with self._engine.begin() as connection:
            self._require(connection, key_id)
            connection.execute(
                update(_KEYS).where(_KEYS.c.id == key_id).values(revoked_unix_s=int(self._clock()))
            )
            self._changed(connection)

    def rotate(self, key_id: str, grace_s: float) -> str:
        """Returns a new secret for the key; its old ones end after `grace_s` seconds."""
        secret = new_secret()
        end_s = int(self._clock() + grace_s)
        with self._engine.begin() as connection:
            self._require(connection, key_id)
            mine = _SECRETS.c.key_id == key_id
            connection.execute(delete(_SECRETS).where(mine, _SECRETS.c.expires_unix_s <= self._clock()))
            later = _SECRETS.c.expires_unix_s.is_(None) | (_SECRETS.c.expires_unix_s > end_s)
            connection.execute(update(_SECRETS).where(mine, later).values(expires_unix_s=end_s))
            self._add_secret(connection, key_id, secret)
            self._changed(connection)
        return secret

    def _readable(self, row: Row[Any]) -> KeyEntry | None:
        """The entry; None for an agreement of another version, which must not keep others from being read."""
        try:
            return self._entry(row.agreement, row.hash, row.secret_expires, row.revoked_unix_s)
        except msgspec.DecodeError as error:
            _log.error("key %s of the store is not accepted, its agreement cannot be read: %s", row.id, error)
            return None

    def _entry(
        self, agreement: str, hash_: str, secret_expires: int | None, revoked_unix_s: int | None
    ) -> KeyEntry:
        entry = msgspec.json.decode(agreement, type=KeyEntry)
        ends = [moment for moment in (entry.expires_unix_s, secret_expires) if moment is not None]
        return msgspec.structs.replace(
            entry,
            hash=hash_,
            disabled=revoked_unix_s is not None,
            expires_unix_s=min(ends, default=None),
        )

    def _require(self, connection: Connection, key_id: str) -> None:
        row = connection.execute(select(_KEYS.c.revoked_unix_s).where(_KEYS.c.id == key_id)).one_or_none()
        if row is None:
            raise KeyStoreError(f"there is no key {key_id} in the store; `millrace keys list` shows them")
        if row.revoked_unix_s is not None:
            raise KeyStoreError(f"the key {key_id} is revoked already; create a new one")

    def _add_secret(self, connection: Connection, key_id: str, secret: str) -> None:
        connection.execute(insert(_SECRETS).values(hash=hash_key(secret), key_id=key_id))

    def _changed(self, connection: Connection) -> None:
        connection.execute(insert(_CHANGES).values(changed_unix_s=int(self._clock())))
