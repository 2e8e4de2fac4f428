"""What answers forgot of their keys and values, as far as it was measured, and how they go on for ever."""

from __future__ import annotations

from observability.emit.names import counter, histogram, span

KV_LOST = histogram(
    "millrace_kv_lost_ratio{model,revision,tier}",
    "1",
    "Share of its attention that an answer lost at most by forgetting keys and values, where measured.",
    (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0),
)
ENGINE_RENEWED = span(
    "engine.renewed",
    "At the end of the model's positions, until its next token: what it keeps is computed again.",
)
RENEWALS = counter(
    "millrace_engine_renewals_total",
    "{renewal}",
    "Times that answers went on beyond the model's positions.",
)
RENEWAL_SECONDS = counter(
    "millrace_engine_renewal_seconds_total",
    "s",
    "Pauses of answers that went on beyond the model's positions, up to their next token.",
)
