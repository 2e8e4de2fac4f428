"""Finds the sequence that makes a step fail, without ending the others.

After a failed step every running sequence goes back to the queue (its blocks' finished content stays in the
prefix cache) and those of the failed step are suspects. Suspects then run in groups that are halved on every
further failure. A group is cleared when all of its members got past the position at which the step failed. A
suspect that fails alone is accused, and a probe runs next: a request that is known to be good. If its step
succeeds, the accused is poisoned; if it fails too, it is not the requests: the runner is broken. Others that
run show nothing, because there may be none.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Suspect(Protocol):
    """A sequence, as far as it must be known whether it got past a position, or has ended."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def num_confirmed(self) -> int: ...
    @property
    def is_finished(self) -> bool: ...


S = TypeVar("S", bound=Suspect)


class FailureIsolation(Generic[S]):
    """Groups of suspects, the first of which runs alone."""

    def __init__(self) -> None:
        self._groups: list[list[S]] = []
        # Sequence to the position that it must get past.
        self._must_pass: dict[int, int] = {}
        # Failed alone, each with the cause; poisoned unless the runner turns out to be broken.
        self._accused: list[tuple[S, str]] = []
        self._probe: S | None = None

    @property
    def active(self) -> bool:
        """Whether plans are restricted."""
        return bool(self._groups)

    def allowed(self) -> frozenset[int] | None:
        """Sequences that the next plan may contain; None when every one may."""
        while self._groups:
            if not all(map(self._is_cleared, self._groups[0])):
                return frozenset(sequence.sequence_id for sequence in self._groups[0])
            self._groups.pop(0)
        self._must_pass.clear()
        return None

    @property
    def wants_probe(self) -> bool:
        """Whether somebody is accused, and nothing runs that would show if the runner works."""
        return bool(self._accused) and self._probe is None

    def probe(self, good: S) -> None:
        """Has `good`, which cannot make a step fail, run alone before anybody else."""
        self._probe = good
        self._must_pass[good.sequence_id] = 1
        self._groups.insert(0, [good])

    def succeeded(self) -> list[tuple[S, str]]:
        """A step with at least one row came back: the runner works, so whoever is accused is guilty."""
        self._probe = None
        guilty, self._accused = self._accused, []
        return guilty

    def failed(self, suspects: list[tuple[S, int]], cause: str, *, num_ended: int = 0) -> bool:
        """A step failed that was to bring its sequences past these positions, and everything that ran was
        reset; others of its sequences have ended meanwhile. False when it is the runner that is broken.
        """
        uncleared = [sequence for sequence, _ in suspects]
        if self._probe in uncleared:
            return False
        for sequence, position in suspects:
            known = self._must_pass.get(sequence.sequence_id, 0)
            self._must_pass[sequence.sequence_id] = max(known, position)
        if self._groups:
            members = {sequence.sequence_id for sequence in uncleared}
            rest = [each for each in self._groups.pop(0) if each.sequence_id not in members]
            if rest:
                self._groups.insert(0, rest)
        if len(uncleared) > 1:
            middle = len(uncleared) // 2
            self._groups[:0] = [uncleared[:middle], uncleared[middle:]]
        elif uncleared and num_ended:
            # It may have been one of those: whoever was not alone is tried again.
            self._groups.insert(0, uncleared)
        elif uncleared:
            self._accused.append((uncleared[0], cause))
        return True

    def _is_cleared(self, sequence: S) -> bool:
        return sequence.is_finished or sequence.num_confirmed >= self._must_pass.get(sequence.sequence_id, 0)
