"""Limits under streams whose engines are killed: counted in Redis, where a test sees what is held."""

from __future__ import annotations

import redis as sync_redis
from sqlalchemy import select

from gateway.ledger.tables import REQUESTS, open_ledger
from tests.e2e.stack import CONFIG, Stack, eventually, limited_config
from tests.redis_server import RedisServer

# Of the tenant whose key the stack makes; more than a test asks for, as it looks at what is given back.
TENANT = "development"
NUM_SLOTS = 10_000
MONTH_TOKENS = 1_000_000_000
# No stream of a test runs so long: a slot that is free again was given back, and has not lapsed.
_LEASE_S = 900.0
assert f"[tenants.{TENANT}]" in CONFIG


def limited(server: RedisServer) -> str:
    """CONFIG, with limits of tokens and streams for the tenant."""
    table = f"[tenants.{TENANT}]"
    limits = f"{table}\nmax_concurrent_streams = {NUM_SLOTS}\nmonthly_tokens = {MONTH_TOKENS}"
    # Nothing here is about a store that is lost: a machine that is busy must not seem to have lost it.
    store = f"lease_ttl_s = {_LEASE_S}"
    config = limited_config(server.url, _LEASE_S, (), {}).replace(store, f"{store}\nstore_timeout_ms = 30000")
    return config.replace(table, limits)


def held(server: RedisServer) -> tuple[int, int]:
    """Slots that are held, and tokens of the month: what was used, and what is reserved beyond that."""
    with sync_redis.Redis.from_url(server.url) as client:
        keys = client.keys(f"millrace:tenant:{TENANT}:tokens:*")
        slots = client.zcard(f"millrace:tenant:{TENANT}:streams")
        return slots, sum(int(client.get(key)) for key in keys)  # type: ignore[arg-type,union-attr,return-value]


def _used(stack: Stack) -> int:
    """Tokens of the tenant's rows in the ledger."""
    with open_ledger(f"sqlite:///{stack.directory}/ledger.sqlite").connect() as connection:
        rows = connection.execute(select(REQUESTS).where(REQUESTS.c.tenant == TENANT)).mappings()
        return sum(row["prompt_tokens"] + row["completion_tokens"] + row["candidate_tokens"] for row in rows)


def assert_limits_are_whole(stack: Stack, server: RedisServer) -> None:
    """No slot is held and nothing is reserved: the month has what the ledger has, once all have ended."""
    assert eventually(lambda: held(server) == (0, _used(stack))), (held(server), _used(stack))
    assert _used(stack) > 0
