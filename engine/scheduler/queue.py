"""The waiting sequences and the one order in which they are admitted.

Tier first. Inside a tier, preempted sequences come back first. Then the tenants are compared by weighted
service in bands of `fairness_band_tokens`: who was served less comes first, and among tenants in the same
band the least slack to the TTFT deadline decides, then arrival. So a deadline cannot be used to jump the
fair share, and small differences in service do not override a deadline.

Aging: one of every `aging_interval` admissions goes to the request that has waited longest, once that is
longer than `aging_s`. Whatever the load of higher tiers, every request is admitted in the end.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

from engine.config import SchedulerConfig
from engine.scheduler.fairness import Account, VirtualTokenCounters
from engine.scheduler.sequence import Sequence

_NO_DEADLINE = float("inf")

# (deadline, arrival order, sequence): the heap of one tenant in one tier.
_Heap = list[tuple[float, tuple[int, int], Sequence]]


def account_of(sequence: Sequence) -> Account:
    """Who is charged for the sequence."""
    return sequence.priority, sequence.group.request.tenant


class WaitingQueue:
    """Waiting sequences. Removal is lazy in the heaps; `_members` is the truth."""

    def __init__(self, config: SchedulerConfig, counters: VirtualTokenCounters) -> None:
        self._config = config
        self._counters = counters
        # Priority to the heaps of its tenants; preempted sequences have one of their own.
        self._tiers: dict[int, dict[Account, _Heap]] = {}
        self._preempted: dict[int, list[tuple[tuple[int, int], Sequence]]] = {}
        # All members in order of joining, for aging.
        self._members: OrderedDict[int, Sequence] = OrderedDict()
        self._num_by_priority: dict[int, int] = {}
        self.num_by_tier: Counter[str] = Counter()
        self._num_admitted = 0
        # Tokens to compute per member, as they were when it joined.
        self._tokens: dict[int, int] = {}
        self.pending_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def num_by_tier_above(self, priority: int) -> dict[int, int]:
        """Members of each tier from this one up, by priority."""
        return {each: count for each, count in self._num_by_priority.items() if each >= priority}

    def num_at_or_above(self, priority: int) -> int:
        """Members of this tier and of higher ones."""
        return sum(count for each, count in self._num_by_priority.items() if each >= priority)

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence; one that was preempted keeps its rank."""
        priority = sequence.priority
        if sequence.num_preemptions:
            heapq.heappush(self._preempted.setdefault(priority, []), (sequence.order, sequence))
        else:
            deadline = sequence.group.request.ttft_deadline_s
            heap = self._tiers.setdefault(priority, {}).setdefault(account_of(sequence), [])
            heapq.heappush(heap, (deadline or _NO_DEADLINE, sequence.order, sequence))
        self._members[sequence.sequence_id] = sequence
        self._num_by_priority[priority] = self._num_by_priority.get(priority, 0) + 1
        self.num_by_tier[sequence.group.request.tier] += 1
        self._tokens[sequence.sequence_id] = sequence.num_known
        self.pending_tokens += sequence.num_known

    def remove(self, sequence: Sequence) -> None:
        """Takes a member out."""
        del self._members[sequence.sequence_id]
        self._num_by_priority[sequence.priority] -= 1
        if not self._num_by_priority[sequence.priority]:
            del self._num_by_priority[sequence.priority]
        self.num_by_tier[sequence.group.request.tier] -= 1
        self.pending_tokens -= self._tokens.pop(sequence.sequence_id)

    def peek(self, now: float, skipped: set[int]) -> Sequence | None:
        """The member to admit next, `skipped` ones left out; None when there is none."""
        aged = self._aged(now, skipped)
        if aged is not None:
            return aged
        for priority in sorted(self._num_by_priority, reverse=True):
            found = self._peek_preempted(priority, skipped) or self._peek_tenants(priority, skipped)
            if found is not None:
                return found
        return None

    def oldest(self) -> Sequence | None:
        """The member that joined first."""
        return next(iter(self._members.values()), None)

    def admitted(self, sequence: Sequence, now: float) -> None:
        """Takes out a member that was admitted, and lets one that won by age keep its place."""
        if self.is_aged_turn(sequence, now):
            sequence.boosted = True
        self._num_admitted += 1
        self.remove(sequence)

    def is_aged_turn(self, sequence: Sequence, now: float) -> bool:
        """Whether the member is first because of its age."""
        return self._aged(now, set()) is sequence

    def _aged(self, now: float, skipped: set[int]) -> Sequence | None:
        if self._num_admitted % self._config.aging_interval != self._config.aging_interval - 1:
            return None
        oldest = self.oldest()
        if oldest is None or oldest.sequence_id in skipped:
            return None
        return oldest if now - oldest.group.request.arrival_s > self._config.aging_s else None

    def _peek_preempted(self, priority: int, skipped: set[int]) -> Sequence | None:
        heap = self._preempted.get(priority)
        if not heap:
            return None
        while heap and self._is_stale(heap[0][1], preempted=True):
            heapq.heappop(heap)
        if not skipped:
            return heap[0][1] if heap else None
        live = [entry for entry in heap if not self._is_stale(entry[1], preempted=True)]
        left = [entry for entry in live if entry[1].sequence_id not in skipped]
        return min(left)[1] if left else None

    def _peek_tenants(self, priority: int, skipped: set[int]) -> Sequence | None:
        best: tuple[tuple[int, float, tuple[int, int]], Sequence] | None = None
        floor = self._counters.floor(priority)
        tenants = self._tiers.get(priority, {})
        for account in list(tenants):
            head = self._head(tenants[account], skipped)
            if head is None:
                if not tenants[account]:
                    del tenants[account]
                continue
            deadline, order, sequence = head
            ahead = self._counters.counter(account) - floor
            key = (int(ahead // self._config.fairness_band_tokens), deadline, order)
            if best is None or key < best[0]:
                best = key, sequence
        return None if best is None else best[1]

    def _head(self, heap: _Heap, skipped: set[int]) -> tuple[float, tuple[int, int], Sequence] | None:
        while heap and self._is_stale(heap[0][2], preempted=False):
            heapq.heappop(heap)
        if not heap or heap[0][2].sequence_id not in skipped:
            return heap[0] if heap else None
        left = [
            entry
            for entry in heap
            if entry[2].sequence_id not in skipped and not self._is_stale(entry[2], preempted=False)
        ]
        return min(left, default=None)

    def _is_stale(self, sequence: Sequence, *, preempted: bool) -> bool:
        member = sequence.sequence_id in self._members
        return not member or bool(sequence.num_preemptions) != preempted
