"""Finds the sequence that makes a step fail, without ending the others.

After a failed step every running sequence goes back to the queue (its blocks' finished content stays in the
prefix cache) and those of the failed step are suspects. Suspects then run in groups that are halved on every
further failure. A group is cleared when all of its members got past the position at which the step failed. A
suspect that fails alone is poisoned. When two suspects fail alone with no step succeeding in between, it is
not the requests: the runner is broken, and isolation gives up.
"""

from __future__ import annotations

from engine.scheduler.results import poisoned
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState, StepInFlight
from engine.types import RequestFailure


class FailureIsolation:
    """Groups of suspects, the first of which runs alone."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._groups: list[list[Sequence]] = []
        # Sequence to the position that it must get past.
        self._must_pass: dict[int, int] = {}
        # Failed alone; poisoned unless the runner turns out to be broken.
        self._accused: list[tuple[Sequence, str]] = []
        self._lone_failures = 0

    @property
    def active(self) -> bool:
        """Whether plans are restricted."""
        return bool(self._groups)

    def allowed(self) -> frozenset[int] | None:
        """Sequences that the next plan may contain; None when every one may."""
        while self._groups:
            group = [sequence for sequence in self._groups[0] if not self._is_cleared(sequence)]
            if group:
                return frozenset(sequence.sequence_id for sequence in self._groups[0])
            self._groups.pop(0)
        self._must_pass.clear()
        return None

    def succeeded(self) -> None:
        """A step with at least one row came back: the runner works, so whoever is accused is guilty."""
        self._lone_failures = 0
        self.convict()

    def convict(self) -> None:
        """Ends the accused with an error of their own."""
        for sequence, cause in self._accused:
            if sequence.status is not Status.FINISHED:
                self._state.fail_group(sequence.group, poisoned(cause))
        self._accused.clear()

    def failed(self, step: StepInFlight, cause: str, now: float) -> bool:
        """Books a failed step and resets everything that ran; False when it is the runner that is broken."""
        suspects = [row for row in step.rows.values() if row.sequence.status is not Status.FINISHED]
        for row in suspects:
            position = row.start + row.num_tokens
            known = self._must_pass.get(row.sequence.sequence_id, 0)
            self._must_pass[row.sequence.sequence_id] = max(known, position)
        self._reset_running(now)
        uncleared = [row.sequence for row in suspects]
        if self._groups:
            members = {sequence.sequence_id for sequence in uncleared}
            rest = [each for each in self._groups.pop(0) if each.sequence_id not in members]
            if rest:
                self._groups.insert(0, rest)
        if len(uncleared) > 1:
            middle = len(uncleared) // 2
            self._groups[:0] = [uncleared[:middle], uncleared[middle:]]
        if len(uncleared) != 1:
            return True
        self._lone_failures += 1
        self._accused.append((uncleared[0], cause))
        if self._lone_failures >= 2:
            return False
        if not self._groups:
            self.convict()
        return True

    def give_up(self, failure: RequestFailure) -> None:
        """Ends every request: the runner is broken."""
        self._groups.clear()
        self._must_pass.clear()
        self._accused.clear()
        for group in list(self._state.groups.values()):
            self._state.fail_group(group, failure)

    def _is_cleared(self, sequence: Sequence) -> bool:
        if sequence.status is Status.FINISHED:
            return True
        return sequence.num_confirmed >= self._must_pass.get(sequence.sequence_id, 0)

    def _reset_running(self, now: float) -> None:
        state = self._state
        for step in state.in_flight:
            step.void = True
        for sequence in list(state.running):
            state.preempt(sequence, "", now, counts=False)
        for group in state.groups.values():
            for sequence in group.sequences:
                sequence.num_pending = 0
        if state.cache.has_host_tier:
            # Copies of the failed plan may not have happened.
            state.cache.forget_contents()
