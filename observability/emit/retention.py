"""What answers forgot of their keys and values, as far as it was measured."""

from __future__ import annotations

from observability.emit.names import histogram

KV_LOST = histogram(
    "millrace_kv_lost_ratio{model,revision,tier}",
    "1",
    "Share of its attention that an answer lost at most by forgetting keys and values, where measured.",
    (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
