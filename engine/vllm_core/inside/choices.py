"""What the bridge remembers of requests that have not ended, and what it reports of each choice."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .calls import CoreCall

# Numbers of contract.outputs.FinishReason.
STOP, LENGTH, CANCELLED, DEADLINE, ERROR = 1, 2, 4, 5, 6
# Names of observability.emit.names.Cause.
PREEMPTION, BATCH_FULL, KV_PRESSURE = "preemption", "batch_full", "kv_pressure"
GRAMMAR_COMPILE = "grammar_compile"
# A shorter wait has no cause worth naming, in seconds.
_SHORT_S = 0.005


@dataclass(slots=True)
class CoreChoice:
    """One choice under way at vLLM. Times are seconds of CLOCK_MONOTONIC."""

    call: CoreCall
    arrival_s: float
    scheduled_s: float | None = None
    first_token_s: float | None = None
    # When it lost its batch slot, while it has none.
    preempted_s: float | None = None
    came_back_s: float | None = None
    num_output: int = 0
    num_steps: int = 0
    num_cached: int = 0
    absences: list[tuple[float, float]] = field(default_factory=list)
    comebacks: list[tuple[float, float, int]] = field(default_factory=list)
    # Why it waited for its first batch slot.
    wait_cause: str = ""

    def happened(self, kind: str, at_s: float) -> None:
        """An event of vLLM's scheduler: "SCHEDULED" or "PREEMPTED"; others say nothing new."""
        if kind == "PREEMPTED":
            self.preempted_s = at_s
        elif kind == "SCHEDULED" and self.scheduled_s is None:
            self.scheduled_s = at_s
        elif kind == "SCHEDULED" and self.preempted_s is not None:
            self.absences.append((self.preempted_s, at_s))
            self.preempted_s, self.came_back_s = None, at_s

    def sampled(self, num_tokens: int, at_s: float) -> None:
        """A step gave it tokens."""
        self.num_steps += 1
        self.num_output += num_tokens
        if self.first_token_s is None:
            self.first_token_s = at_s
        if self.came_back_s is not None:
            # vLLM does not say how much of it was still cached: all that was known counts.
            lost = len(self.call.prompt_token_ids) + self.num_output - num_tokens
            self.comebacks.append((self.came_back_s, at_s, lost))
            self.came_back_s = None

    def first_token(self) -> dict[str, Any]:
        """engine.types.FirstTokenTimings."""
        end = self.first_token_s or self.arrival_s
        begin = min(self.scheduled_s if self.scheduled_s is not None else end, end)
        computed = len(self.call.prompt_token_ids) - self.num_cached
        return {
            "arrival_s": self.arrival_s,
            "first_scheduled_s": begin,
            "prefill_end_s": end,
            "first_token_s": end,
            "cached_prompt_tokens": self.num_cached,
            "prefill_chunks": [(begin, end, computed)],
        }

    def history(self, now: float) -> dict[str, Any]:
        """engine.types.ChoiceHistory."""
        causes: dict[str, float] = {}
        if self.absences:
            causes[PREEMPTION] = sum(end - start for start, end in self.absences)
        waited = (self.scheduled_s or self.arrival_s) - self.arrival_s
        if self.wait_cause and waited > _SHORT_S:
            causes[self.wait_cause] = waited
        return {
            "num_steps": self.num_steps,
            "num_preemptions": len(self.absences) + (self.preempted_s is not None),
            "decode_s": now - self.first_token_s if self.first_token_s is not None else 0.0,
            "delayed_by_s": causes,
            "absences_s": self.absences,
            "comebacks_s": self.comebacks,
        }


@dataclass(slots=True)
class CoreRequest:
    """A request and its choices that have not ended, by vLLM's key."""

    request: dict[str, Any]
    start_tag: float
    choices: dict[str, CoreChoice] = field(default_factory=dict)
    first_token_sent: bool = False

    def event(self, choice: CoreChoice, **news: Any) -> dict[str, Any]:
        """engine.types.TokenEvent of a choice."""
        return {
            "request_id": self.request["request_id"],
            "choice_index": choice.call.choice_index,
            **news,
        }

    def failed(self, failure: dict[str, Any]) -> dict[str, Any]:
        """The one event that ends the whole request with an error."""
        return {
            "request_id": self.request["request_id"],
            "choice_index": self.request["choice_index"],
            "finish_reason": ERROR,
            "failure": failure,
        }
