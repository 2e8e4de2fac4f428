"""What waits at the engines. They decide whom they accept: each knows its own queue, and whose turn it is."""

from __future__ import annotations

from gateway.engines.fleet import Fleet


def expected_wait_s(fleet: Fleet, model: str, pool: str) -> float:
    """Seconds that the prompts before a new request for a version of a model take, at the engine that is
    through with them first, of `pool` if one is named; 0 while nothing was measured.
    """
    return min(
        (
            max(load.pending_prefill_tokens, attachment.unstarted_tokens) / load.prefill_tokens_per_s
            if (load := attachment.load).prefill_tokens_per_s
            else 0.0
            for attachment in fleet.ready
            # An engine is ready after it has told what it is.
            if (info := attachment.info) is not None and info.model_key == model and pool in ("", info.pool)
        ),
        default=0.0,
    )
