"""What engines tell of experts that lie on several ranks."""

from __future__ import annotations

from observability.emit.names import counter, gauge

IMBALANCE = gauge(
    "millrace_engine_expert_imbalance_ratio",
    "1",
    "Rows that the experts of the most used rank got lately, over the mean of all ranks; of all layers.",
)
MOVES = counter(
    "millrace_engine_expert_moves_total",
    "{expert}",
    "Experts that have changed ranks, by what they were measured to get.",
)
ALL = (IMBALANCE, MOVES)
