"""Measured speed of the engine, for load reports and estimates."""

from __future__ import annotations

# Weight of the newest step in the averages.
_ALPHA = 0.1


class StepPace:
    """Exponential averages over steps, in tokens per second; 0 while nothing was measured."""

    def __init__(self) -> None:
        self.prefill_tokens_per_s = 0.0
        self.decode_tokens_per_s = 0.0

    def observe(self, prefill: int, decode: int, seconds: float) -> None:
        """Books one step that computed so many prefill and decode tokens in `seconds`."""
        if seconds <= 0:
            return
        if prefill:
            self.prefill_tokens_per_s = _average(self.prefill_tokens_per_s, prefill / seconds)
        if decode:
            self.decode_tokens_per_s = _average(self.decode_tokens_per_s, decode / seconds)


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _ALPHA * (new - old)
