"""The ledger's one table. What changes in it is a step in `migrations`, too."""

from __future__ import annotations

from functools import partial

from sqlalchemy import BigInteger, Column, Engine, Float, Integer, MetaData, String, Table, Text

from contract.outputs import EngineTime
from gateway.database import open_database
from gateway.ledger.migrations import migrate

_METADATA = MetaData()

# Marks columns that `millrace usage` sums up.
_SUMMED = {"is_summed": True}

# One row a request. Times in milliseconds, money in billionths of the currency unit.
REQUESTS = Table(
    "requests",
    _METADATA,
    # Made by the writer, so that a batch can be written again after an unclear failure.
    Column("entry_id", String(32), primary_key=True),
    Column("request_id", String(128), nullable=False, index=True),
    Column("ended_unix_ms", BigInteger, nullable=False, index=True),
    Column("tenant", String(63), nullable=False, index=True),
    Column("key_id", String(128), nullable=False),
    Column("tier", String(63), nullable=False),
    Column("model", String(256), nullable=False),
    # Version of the model; empty where none is told apart.
    Column("revision", String(128), nullable=False),
    Column("face", String(8), nullable=False),
    # The client's own id, and how often it had sent the request before.
    Column("client_request_id", String(128), nullable=False, server_default=""),
    Column("num_retries", Integer, nullable=False, server_default="0"),
    Column("guided", String(16), nullable=False, server_default=""),
    Column("adapter", String(256), nullable=False, server_default=""),
    # See FinishedRequest.path.
    Column("path", String(80), nullable=False, server_default=""),
    Column("outcome", String(64), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_prompt_tokens", Integer, nullable=False, info=_SUMMED),
    Column("completion_tokens", Integer, nullable=False, info=_SUMMED),
    # Computed for candidates and beams, and not returned; they cost as completion tokens do.
    Column("candidate_tokens", Integer, nullable=False, info=_SUMMED),
    # Generated and sent to nobody: on their way to a client that left, after an answer's end, or for a
    # gateway that was killed. They cost nothing.
    Column("unclaimed_tokens", Integer, nullable=False, server_default="0", info=_SUMMED),
    Column("reasoning_tokens", Integer, nullable=False),
    # Tokens drafted and thrown away.
    Column("speculative_waste_tokens", Integer, nullable=False, info=_SUMMED),
    # Tokens computed a second time after preemptions.
    Column("recomputed_tokens", Integer, nullable=False, info=_SUMMED),
    # Seconds of engines: engine_prefill_s, ...
    *(
        Column(f"engine_{name}", Float, nullable=False, server_default="0", info=_SUMMED)
        for name in EngineTime.__struct_fields__
    ),
    Column("num_choices", Integer, nullable=False),
    Column("num_preemptions", Integer, nullable=False),
    Column("num_engines_lost", Integer, nullable=False),
    Column("grammar_ms", Float, nullable=False, info=_SUMMED),
    Column("queue_ms", Float, nullable=False, info=_SUMMED),
    Column("ttft_ms", Float),
    Column("duration_ms", Float, nullable=False),
    # By the prices of tokens, and of an hour of an engine.
    Column("cost_nanos", BigInteger, nullable=False),
    Column("engine_cost_nanos", BigInteger, nullable=False, server_default="0"),
    # The request's free labels as JSON.
    Column("labels", Text, nullable=False),
)


def open_ledger(url: str) -> Engine:
    """The ledger's database, of the present version; raises ConfigError naming gateway.ledger.url."""
    return open_database(url, partial(migrate, tables=_METADATA), key="gateway.ledger.url")
