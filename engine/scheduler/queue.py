"""The waiting sequences and the one order in which they are admitted.

Tier first. Inside a tier, the tenants are compared by weighted service in bands of `fairness_band_tokens`:
who was served less comes first, and in the same band who holds no more places than its share. Then slack
decides, the time until a request must start to meet its TTFT deadline, then arrival; what has started comes
before what has not, and what can no longer meet its deadline after what can. So a deadline cannot be used to
jump the fair share, and small differences in service do not override a deadline.

Aging: one of every `aging_interval` admissions goes to the request that has waited longest, once that is
longer than `aging_s`. Whatever the load of higher tiers, every request is admitted in the end.

Due: a request was accepted because it could come within its tier's limit (see forecast). If the limit is near
and it still waits, because more of higher tiers came than was foreseen, it takes the next place that comes
free. Higher tiers go on displacing lower ones meanwhile, so they hardly wait for it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.kv import BlockHash
from engine.scheduler.fairness import Account, Places, VirtualTokenCounters
from engine.scheduler.sequence import Sequence

_INFINITY = float("inf")
# A request is due when so large a part of its queue limit is left.
_DUE_SHARE = 0.25


def account_of(sequence: Sequence) -> Account:
    """Who is charged for the sequence."""
    return sequence.priority, sequence.group.request.tenant


class _Entry(NamedTuple):
    """A member as its heap has it: by its latest start, then arrival, with its size when it joined."""

    latest_start_s: float
    order: tuple[int, int]
    sequence: Sequence
    num_places: int
    num_tokens: int
    # Blocks of its tokens that others may wait for.
    hashes: tuple[BlockHash, ...]


@dataclass(slots=True)
class Line:
    """What waits for one account, or for several."""

    num_sequences: int = 0
    # Places in the batch that they will take: further choices and beams count.
    num_places: int = 0
    # Tokens to compute before their next token, what they share counted once.
    num_tokens: int = 0
    weight: float = 1.0


class WaitingQueue:
    """Waiting sequences. Removal is lazy in the heaps; `_members` is the truth."""

    def __init__(self, config: SchedulerConfig, counters: VirtualTokenCounters, places: Places) -> None:
        self._config = config
        self._counters = counters
        self._places = places
        # Heaps by account; those that have missed their latest start are moved to the second.
        self._heaps: dict[Account, list[_Entry]] = {}
        self._late: dict[Account, list[_Entry]] = {}
        # Blocks that members will compute, with how many of them.
        self._wanted: Counter[BlockHash] = Counter()
        # The present entry of every member, in order of joining.
        self._members: dict[int, _Entry] = {}
        self._lines: dict[Account, Line] = {}
        self._num_admitted = 0
        # (moment at which it is due, order, sequence) of those that have a queue limit.
        self._due: list[tuple[float, tuple[int, int], Sequence]] = []
        self.pending_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry.sequence for entry in self._members.values())

    def at_or_above(self, priority: int) -> Line:
        """Everything that waits in this tier and in higher ones."""
        lines = [line for (each, _), line in self._lines.items() if each >= priority]
        return Line(
            num_sequences=sum(line.num_sequences for line in lines),
            num_places=sum(line.num_places for line in lines),
            num_tokens=sum(line.num_tokens for line in lines),
        )

    @property
    def accounts(self) -> Set[Account]:
        """Who waits."""
        return self._lines.keys()

    def accounts_of(self, priority: int) -> dict[str, Line]:
        """What waits in one tier, by tenant."""
        return {tenant: line for (each, tenant), line in self._lines.items() if each == priority}

    def join(self, sequence: Sequence) -> None:
        """The first sequence of a new request is about to be added."""
        account = account_of(sequence)
        if account not in self._lines:
            self._counters.join(account, self.accounts_of(sequence.priority))

    def push(self, sequence: Sequence, num_tokens: int, prompt_s: float) -> None:
        """Adds a sequence, with what it will compute and how long that takes."""
        request, latest_start_s = sequence.group.request, -_INFINITY
        if sequence.group.first_scheduled_s is None:
            latest_start_s = _INFINITY
            if request.ttft_deadline_s is not None:
                latest_start_s = request.ttft_deadline_s - prompt_s
            if request.queue_deadline_s is not None:
                margin_s = _DUE_SHARE * (request.queue_deadline_s - request.arrival_s)
                due_s = request.queue_deadline_s - prompt_s - margin_s
                heapq.heappush(self._due, (due_s, sequence.order, sequence))
        hashes = tuple(sequence.hasher.hashes)
        entry = _Entry(latest_start_s, sequence.order, sequence, sequence.num_places, num_tokens, hashes)
        heapq.heappush(self._heaps.setdefault(account_of(sequence), []), entry)
        self._members[sequence.sequence_id] = entry
        self._wanted.update(hashes)
        self._count(entry, 1)

    def remove(self, sequence: Sequence) -> None:
        """Takes a member out."""
        entry = self._members.pop(sequence.sequence_id)
        for block_hash in entry.hashes:
            self._wanted[block_hash] -= 1
            if not self._wanted[block_hash]:
                del self._wanted[block_hash]
        self._count(entry, -1)

    def wants(self, block_hash: BlockHash) -> bool:
        """Whether a member will compute this block."""
        return block_hash in self._wanted

    def _count(self, entry: _Entry, sign: int) -> None:
        account = account_of(entry.sequence)
        line = self._lines.setdefault(account, Line(weight=entry.sequence.group.request.weight))
        line.num_sequences += sign
        line.num_places += sign * entry.num_places
        line.num_tokens += sign * entry.num_tokens
        self.pending_tokens += sign * entry.num_tokens
        if not line.num_sequences:
            del self._lines[account]
            self._heaps.pop(account, None)
            self._late.pop(account, None)

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
        for priority in sorted({each for each, _ in self._lines}, reverse=True):
            found = self._first_of(priority, now, skipped)
            if found is not None:
                return found
        return None

    def oldest(self) -> Sequence | None:
        """The member that joined first."""
        return next(iter(self), None)

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
            deadline_s = sequence.group.request.queue_deadline_s
            is_kept = deadline_s is not None and deadline_s >= now
            waits = sequence.sequence_id in self._members and sequence.group.first_scheduled_s is None
            if waits and is_kept:
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

    def _first_of(self, priority: int, now: float, skipped: set[int]) -> Sequence | None:
        best: tuple[tuple[float, bool, bool, float, tuple[int, int]], Sequence] | None = None
        waiting = {tenant: line.weight for tenant, line in self.accounts_of(priority).items()}
        fair = self._places.fair_per_weight(priority, waiting)
        for tenant, weight in waiting.items():
            account = (priority, tenant)
            head, is_late = self._head(account, now, skipped)
            if head is None:
                continue
            has_more = self._places.held(account) > fair * weight
            key = (self._counters.band(account), has_more, is_late, head.latest_start_s, head.order)
            if best is None or key < best[0]:
                best = key, head.sequence
        return None if best is None else best[1]

    def _head(self, account: Account, now: float, skipped: set[int]) -> tuple[_Entry | None, bool]:
        """The account's first, and whether it is late."""
        heap, late = self._heaps.get(account, []), self._late.setdefault(account, [])
        while heap and -_INFINITY < heap[0].latest_start_s < now:
            heapq.heappush(late, heapq.heappop(heap))
        head = self._live_head(heap, skipped)
        if head is not None:
            return head, False
        return self._live_head(late, skipped), True

    def _live_head(self, heap: list[_Entry], skipped: set[int]) -> _Entry | None:
        while heap and self._is_stale(heap[0]):
            heapq.heappop(heap)
        if not heap or heap[0].sequence.sequence_id not in skipped:
            return heap[0] if heap else None
        live = (each for each in heap if not self._is_stale(each))
        return min((each for each in live if each.sequence.sequence_id not in skipped), default=None)

    def _is_stale(self, entry: _Entry) -> bool:
        return self._members.get(entry.sequence.sequence_id) is not entry
