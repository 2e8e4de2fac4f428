"""What a waiting sequence may need besides a slot and blocks, and wait for while others compute: its adapter,
a part of its prefix from elsewhere, room for keys that it forgets.

The scheduler gives a sequence the needs that its request has. Most have none, so nothing of this module runs
for them. The admitter asks what is lacking; what was begun then is taken in by the next plans, as long as
something is on its way.
"""

from __future__ import annotations

from engine.scheduler.admitter import Admitter
from engine.scheduler.disk_prefixes import DiskPrefixes
from engine.scheduler.plan_draft import PlanDraft
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import SchedulerState
from engine.types import MemoryPlan


class AdapterNeed:
    """The sequence's adapter in a slot."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def lacks(self, draft: PlanDraft, sequence: Sequence) -> str:
        """See Need."""
        return "" if self._state.admits_adapter(sequence) else "cold_adapter"

    def begin_step(self) -> bool:
        """See Need."""
        for name, problem in self._state.adapters.begin_step().items():
            self._state.fail_adapter(name, problem)
        return self._state.adapters.is_busy


class PrefixNeed:
    """A part of the sequence's prefix from a disk, or from another engine."""

    def __init__(self, state: SchedulerState, prefixes: DiskPrefixes, admitter: Admitter) -> None:
        self._state = state
        self._prefixes = prefixes
        self._admitter = admitter

    def lacks(self, draft: PlanDraft, sequence: Sequence) -> str:
        """See Need."""
        prefixes, admitter = self._prefixes, self._admitter
        if draft.under_way is None or sequence.is_beam:
            return ""
        if sequence.disk_read is None and not prefixes.can_wait(sequence):
            return ""
        if sequence.needs_every_position or admitter.can_fork(draft, sequence):
            return ""
        sequence.hasher.extend(sequence.token_ids, sequence.num_known)
        if not prefixes.awaits(sequence, draft.step_id, lambda: admitter.num_to_spare(sequence)):
            return ""
        return "hand_over" if prefixes.awaits_source(sequence) else "offload"

    def begin_step(self) -> bool:
        """See Need."""
        return self._prefixes.begin_step([step.step_id for step in self._state.in_flight])


class ForgottenRoom:
    """Memory for keys of forgotten blocks, in blocks: a sequence that is measured has its part from its
    admission until it leaves the batch. Those that need some go in the order of the line.
    """

    def __init__(self, state: SchedulerState, memory: MemoryPlan) -> None:
        self._state = state
        self._num_blocks = memory.forgotten_bytes // max(1, memory.forgotten_block_bytes)

    def lacks(self, draft: PlanDraft, sequence: Sequence) -> str:
        """See Need."""
        needed = sequence.num_measured_blocks
        if not needed:
            return ""
        held = sum(each.num_measured_blocks for each in self._state.running)
        draft.lacks_forgotten_room |= needed + held > self._num_blocks
        return "kv_pressure" if draft.lacks_forgotten_room else ""

    def begin_step(self) -> bool:
        """See Need."""
        return False
