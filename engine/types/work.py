"""What computing a step takes by the shapes of the model: operations, and bytes that must be read."""

from __future__ import annotations

import msgspec

from engine.types.step import SchedulerOutput


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model, and what its device can do; 0 where that is not known."""

    # Two for each weight that a token is multiplied with; of experts, of those that it is sent to.
    flop_per_token: float = 0.0
    # Attention's, of one layer, for each position that a token looks at.
    flop_per_position: float = 0.0
    # Layers by how far they look back, the token itself included; 0 is to the beginning.
    layers: tuple[tuple[int, int], ...] = ()
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0
    # Of the device, each second.
    peak_flop: float = 0.0
    peak_read_bytes: float = 0.0


UNKNOWN_WORK = ModelWork()


def step_work(plan: SchedulerOutput, model: ModelWork) -> tuple[float, float]:
    """(operations, bytes read) of a step, each sequence's keys and values read once."""
    flop, read_bytes = plan.num_tokens * model.flop_per_token, float(model.weights_bytes)
    for row in plan.scheduled:
        end = row.start + row.num_tokens
        # Of the tokens in the middle of the row.
        mean = row.start + (row.num_tokens + 1) / 2
        positions = sum(num * (min(mean, window) if window else mean) for window, num in model.layers)
        flop += row.num_tokens * positions * model.flop_per_position
        read_bytes += end * model.kv_bytes_per_token
    return flop, read_bytes
