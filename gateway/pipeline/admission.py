"""What waits at the engines, in the form that admission decides by."""

from __future__ import annotations

from gateway.engines.fleet import Fleet
from gateway.overload import EngineQueue


def engine_queues(fleet: Fleet, pool: str) -> list[EngineQueue]:
    """One for each engine that takes requests, of `pool` if one is named: what it reported, and what was
    submitted since.
    """
    queues = []
    for attachment in fleet.ready:
        load, info = attachment.load, attachment.info
        assert info is not None, "an engine is ready after it has told what it is"
        if pool not in ("", info.pool):
            continue
        queues.append(
            EngineQueue(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                max_num_seqs=info.max_num_seqs,
                pending_prefill_tokens=max(load.pending_prefill_tokens, attachment.unstarted_tokens),
                prefill_tokens_per_s=load.prefill_tokens_per_s,
            )
        )
    return queues
