"""What the engine reached lately, and what is left to do: the load that routers and the door look at."""

from __future__ import annotations

from typing import Any

# Weight of the newest step.
_NEWEST = 0.2
# Fewer prompt tokens say nothing about how fast prompts are computed.
_ENOUGH_TOKENS = 64


class CoreMeter:
    """Rates and counts over all steps. Blocks and what runs are as vLLM reports them, each data-parallel rank
    of its own: they are added up.
    """

    def __init__(self, num_blocks: int, num_ranks: int = 1) -> None:
        self.num_blocks = num_blocks
        self._blocks_of_rank = num_blocks / num_ranks
        # By rank that has spoken.
        self._running: dict[int, int] = {}
        self._used: dict[int, float] = {}
        self.counters: dict[str, Any] = {
            "prefix_queried_tokens": 0,
            "prefix_hit_tokens": 0,
            "computed_prompt_tokens": 0,
            "preemptions": {},
        }
        self._prefill_rate = 0.0
        self._decode_rate = 0.0
        self._last_s: float | None = None
        self._totals: list[dict[str, Any]] = []

    def idle(self) -> None:
        """Nothing is under way: the next step begins when something comes."""
        self._last_s = None
        self._running.clear()

    @property
    def num_running(self) -> int:
        """Choices that have batch slots, of all ranks."""
        return sum(self._running.values())

    @property
    def num_free(self) -> int:
        """Blocks that nobody uses, of all ranks; a rank that has said nothing uses none."""
        return self.num_blocks - round(sum(self._used.values()))

    def record(self, rank: int, num_running: int, used_share: float) -> None:
        """What a rank said with a step: of its batch slots, and the share of its blocks that is in use."""
        self._running[rank] = num_running
        self._used[rank] = used_share * self._blocks_of_rank

    def counted(self, ranks: list[dict[str, int]]) -> None:
        """What all ranks have counted in their books, in their order."""
        self._running = {rank: each["running"] for rank, each in enumerate(ranks)}
        self._used = {rank: each["total"] - each["free"] for rank, each in enumerate(ranks)}

    def prompt_done(self, num_tokens: int, num_cached: int) -> None:
        """A prompt was looked up and computed."""
        self.counters["prefix_queried_tokens"] += num_tokens
        self.counters["prefix_hit_tokens"] += num_cached
        self.counters["computed_prompt_tokens"] += num_tokens - num_cached

    def preempted(self, cause: str) -> None:
        """A choice lost its batch slot."""
        self.counters["preemptions"][cause] = self.counters["preemptions"].get(cause, 0) + 1

    def step(
        self, now: float, begin_s: float | None, num_prefill: int, num_sampled: int, num_rows: int
    ) -> None:
        """A step ended. `begin_s` is when its first work was scheduled where nothing was under way."""
        begin = self._last_s if self._last_s is not None else begin_s
        self._last_s = now
        if begin is None or now <= begin or not num_rows:
            return
        seconds = now - begin
        if num_prefill >= _ENOUGH_TOKENS:
            self._prefill_rate = _blend(self._prefill_rate, num_prefill / seconds)
        else:
            self._decode_rate = _blend(self._decode_rate, num_sampled / seconds)
        kind = "decode" if not num_prefill else "prefill" if num_sampled == 0 else "mixed"
        tokens = num_prefill + num_sampled
        self._totals.append(
            {"kind": kind, "num_tokens": tokens, "num_sequences": num_rows, "seconds": seconds}
        )

    def drain_totals(self) -> list[dict[str, Any]]:
        """engine.core.messages.StepTotals since the last time."""
        totals, self._totals = self._totals, []
        return totals

    def load(self, num_open: int, pending_prefill: int, oldest_wait_s: float) -> dict[str, Any]:
        """engine.types.SchedulerLoad."""
        running = min(self.num_running, num_open)
        return {
            "num_running": running,
            "num_waiting": num_open - running,
            "pending_prefill_tokens": pending_prefill,
            "num_free_blocks": self.num_free,
            "num_total_blocks": self.num_blocks,
            "prefill_tokens_per_s": self._prefill_rate,
            "decode_tokens_per_s": self._decode_rate,
            "oldest_wait_s": oldest_wait_s,
            "num_cached_blocks": 0,
            "counters": self.counters,
        }


def _blend(old: float, new: float) -> float:
    return new if not old else (1 - _NEWEST) * old + _NEWEST * new
