"""What waits at the engines, in the form that admission decides by."""

from __future__ import annotations

from gateway.engines.fleet import Fleet
from gateway.overload import EngineQueue


def engine_queues(fleet: Fleet, pool: str) -> list[EngineQueue]:
    """One for each engine that takes requests, of `pool` if one is named: what it reported, and what was
    submitted since.
    """
    return [
        EngineQueue(
            num_running=attachment.load.num_running,
            num_waiting=attachment.load.num_waiting,
            max_num_seqs=info.max_num_seqs,
            pending_prefill_tokens=max(attachment.load.pending_prefill_tokens, attachment.unstarted_tokens),
            prefill_tokens_per_s=attachment.load.prefill_tokens_per_s,
        )
        for attachment in fleet.ready
        # An engine is ready after it has told what it is.
        if (info := attachment.info) is not None and pool in ("", info.pool)
    ]
