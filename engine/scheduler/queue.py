"""The waiting sequences and the one order in which they are admitted.

Tier first. Inside a tier, preempted sequences come back first. Then the tenants are compared by weighted
service in bands of `fairness_band_tokens`: who was served less comes first, and among tenants in the same
band the least slack to the TTFT deadline decides, then arrival. So a deadline cannot be used to jump the
fair share, and small differences in service do not override a deadline.

Aging: one of every `aging_interval` admissions goes to the request that has waited longest, once that is
longer than `aging_s`. Whatever the load of higher tiers, every request is admitted in the end.

Due: a request was accepted because it could start within its tier's queue limit (see forecast). If the limit
is near and it still waits, because more of higher tiers came than was foreseen, it takes the next place that
comes free. Higher tiers go on displacing lower ones meanwhile, so they hardly wait for it.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.scheduler.fairness import Account, VirtualTokenCounters
from engine.scheduler.sequence import Sequence

_NO_DEADLINE = float("inf")
# A request is due when so large a part of its queue limit is left.
_DUE_SHARE = 0.25

# (deadline, arrival order, sequence): the heap of one tenant in one tier.
_Heap = list[tuple[float, tuple[int, int], Sequence]]


def account_of(sequence: Sequence) -> Account:
    """Who is charged for the sequence."""
    return sequence.priority, sequence.group.request.tenant


@dataclass(slots=True)
class Line:
    """What waits in one tier, or for one account."""

    num_sequences: int = 0
    # Places in the batch that they will take: further choices and beams count.
    num_places: int = 0
    # Tokens to compute before their next token.
    num_tokens: int = 0
    weight: float = 1.0


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
        self._by_priority: dict[int, Line] = {}
        self._by_account: dict[Account, Line] = {}
        self.num_by_tier: Counter[str] = Counter()
        self._num_admitted = 0
        # (moment at which it is due, order, sequence) of those that have a queue limit.
        self._due: _Heap = []
        # Places and tokens to compute of each member, as they were when it joined.
        self._sizes: dict[int, tuple[int, int]] = {}
        self.pending_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def at_or_above(self, priority: int) -> Line:
        """Everything that waits in this tier and in higher ones."""
        total = Line()
        for each, line in self._by_priority.items():
            if each >= priority:
                total.num_sequences += line.num_sequences
                total.num_places += line.num_places
                total.num_tokens += line.num_tokens
        return total

    def accounts_of(self, priority: int) -> dict[str, Line]:
        """What waits in one tier, by tenant."""
        return {tenant: line for (each, tenant), line in self._by_account.items() if each == priority}

    def push(self, sequence: Sequence) -> None:
        """Adds a sequence; one that was preempted keeps its rank."""
        priority = sequence.priority
        if sequence.took.num_preemptions:
            heapq.heappush(self._preempted.setdefault(priority, []), (sequence.order, sequence))
        else:
            deadline = sequence.group.request.ttft_deadline_s
            heap = self._tiers.setdefault(priority, {}).setdefault(account_of(sequence), [])
            heapq.heappush(heap, (deadline or _NO_DEADLINE, sequence.order, sequence))
        self._members[sequence.sequence_id] = sequence
        self._push_due(sequence)
        self.num_by_tier[sequence.group.request.tier] += 1
        size = sequence.num_places, sequence.num_known
        self._sizes[sequence.sequence_id] = size
        self.pending_tokens += sequence.num_known
        self._count(sequence, *size, sign=1)

    def _push_due(self, sequence: Sequence) -> None:
        request, started_s = sequence.group.request, sequence.group.first_scheduled_s
        if request.queue_deadline_s is not None and started_s is None:
            margin_s = _DUE_SHARE * (request.queue_deadline_s - request.arrival_s)
            heapq.heappush(self._due, (request.queue_deadline_s - margin_s, sequence.order, sequence))

    def _count(self, sequence: Sequence, num_places: int, num_tokens: int, *, sign: int) -> None:
        account = account_of(sequence)
        for line in (
            self._by_priority.setdefault(sequence.priority, Line()),
            self._by_account.setdefault(account, Line(weight=sequence.group.request.weight)),
        ):
            line.num_sequences += sign
            line.num_places += sign * num_places
            line.num_tokens += sign * num_tokens
        if not self._by_priority[sequence.priority].num_sequences:
            del self._by_priority[sequence.priority]
        if not self._by_account[account].num_sequences:
            del self._by_account[account]

    def remove(self, sequence: Sequence) -> None:
        """Takes a member out."""
        del self._members[sequence.sequence_id]
        self.num_by_tier[sequence.group.request.tier] -= 1
        size = self._sizes.pop(sequence.sequence_id)
        self.pending_tokens -= size[1]
        self._count(sequence, *size, sign=-1)

    def peek(self, now: float, skipped: set[int], *, with_due: bool = True) -> Sequence | None:
        """The member to admit next, `skipped` ones left out; None when there is none. Without `with_due`, due
        members have no privilege.
        """
        aged = self._aged(now, skipped)
        if aged is not None:
            return aged
        due = self._first_due(now)
        if with_due and due is not None and due.sequence_id not in skipped:
            return due
        for priority in sorted(self._by_priority, reverse=True):
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

    def is_due(self, sequence: Sequence, now: float) -> bool:
        """Whether the member is first because its queue limit is near."""
        return self._first_due(now) is sequence

    def _first_due(self, now: float) -> Sequence | None:
        while self._due:
            moment, _, sequence = self._due[0]
            if moment > now:
                return None
            if sequence.sequence_id in self._members and sequence.group.first_scheduled_s is None:
                return sequence
            heapq.heappop(self._due)
        return None

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
        return not member or bool(sequence.took.num_preemptions) != preempted
