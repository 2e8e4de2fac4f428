"""Who waits for a slot, and the one order in which they are admitted (see the page of this package).

A deadline cannot be used to jump the fair share, and small differences in service do not override a deadline.
What has started comes before what has not, and what can no longer meet its deadline after what can.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import NamedTuple

from engine.config import SchedulerConfig
from engine.policy.shares import Account, Shares
from engine.types import Request

# A request is due when so large a part of its queue limit is left.
_DUE_SHARE = 0.25


def account_of(request: Request) -> Account:
    """Who is charged for the request."""
    return request.priority, request.tenant


def slots_of(request: Request) -> int:
    """Slots that the request takes from its start on."""
    return max(request.sampling.beam_width, request.sampling.best_of, 1)


class Waiter(NamedTuple):
    """A sequence that waits, as it was when it joined."""

    sequence_id: int
    request: Request
    # Order of arrival; the second number is the beam's within one request.
    order: tuple[int, int]
    num_slots: int
    # Tokens that it will compute, and how long its prompt takes.
    num_tokens: int
    prompt_s: float
    # Nothing of its request has started.
    is_new: bool = True
    # Blocks of its tokens that others may wait for.
    hashes: tuple[bytes, ...] = ()


# By latest start, then arrival.
_HeapItem = tuple[float, tuple[int, int], Waiter]


@dataclass(slots=True)
class Part:
    """What waits for one account, or for several."""

    num_sequences: int = 0
    # Slots in the batch that they will take: further choices and beams count.
    num_slots: int = 0
    # Tokens to compute before their next token, what they share counted once.
    num_tokens: int = 0
    weight: float = 1.0


class Line:
    """Members by the ids of their sequences. Removal is lazy in the heaps; `_members` is the truth."""

    def __init__(self, config: SchedulerConfig, shares: Shares) -> None:
        self._config = config
        self._shares = shares
        # Heaps by account; those that have missed their latest start are moved to the second.
        self._heaps: dict[Account, list[_HeapItem]] = {}
        self._late: dict[Account, list[_HeapItem]] = {}
        # Blocks that members will compute, with how many of them.
        self._wanted: Counter[bytes] = Counter()
        # In order of joining.
        self._members: dict[int, Waiter] = {}
        self._parts: dict[Account, Part] = {}
        self._num_admitted = 0
        # By the moment at which they are due, those that have a queue limit.
        self._due: list[_HeapItem] = []
        self.pending_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[int]:
        return iter(self._members)

    @property
    def accounts(self) -> Set[Account]:
        """Who waits."""
        return self._parts.keys()

    def parts_of(self, priority: int) -> dict[str, Part]:
        """What waits in one tier, by tenant."""
        return {tenant: part for (each, tenant), part in self._parts.items() if each == priority}

    def tokens_by_tier(self) -> Counter[int]:
        """Tokens that those who wait will compute, by priority."""
        found: Counter[int] = Counter()
        for (priority, _), part in self._parts.items():
            found[priority] += part.num_tokens
        return found

    def late_tiers(self, now: float) -> set[int]:
        """Priorities of those who can no longer meet their deadlines."""
        return {account[0] for account in self._parts if self._has_late(account, now)}

    def ahead(self, request: Request, num_tokens: int, coming: Mapping[str, float]) -> Part:
        """What is served before a request with so many tokens to compute: all of higher tiers, and the fair
        part of its own; `coming` has the slots of its tier, by tenant, that are expected back.
        """
        parts = self.parts_of(request.priority)
        own = parts.pop(request.tenant, Part())
        higher = [part for (each, _), part in self._parts.items() if each > request.priority]
        num_own = own.num_slots + coming.get(request.tenant, 0.0)
        slots = sum(part.num_slots for part in higher) + num_own
        tokens = sum(part.num_tokens for part in higher) + own.num_tokens
        for tenant in {*parts, *coming} - {request.tenant}:
            part = parts.get(tenant, Part(weight=request.weight))
            ratio = part.weight / request.weight
            slots += min(part.num_slots + coming.get(tenant, 0.0), math.ceil((num_own + 1) * ratio))
            tokens += min(part.num_tokens, math.ceil((own.num_tokens + num_tokens) * ratio))
        return Part(num_slots=math.ceil(slots), num_tokens=tokens)

    def push(self, waiter: Waiter) -> None:
        """Adds a member."""
        request, latest_start_s = waiter.request, -math.inf
        account = account_of(request)
        if waiter.is_new:
            latest_start_s = math.inf
            if request.ttft_deadline_s is not None:
                latest_start_s = request.ttft_deadline_s - waiter.prompt_s
            if request.queue_deadline_s is not None:
                margin_s = _DUE_SHARE * (request.queue_deadline_s - request.arrival_s)
                due_s = request.queue_deadline_s - waiter.prompt_s - margin_s
                heapq.heappush(self._due, (due_s, waiter.order, waiter))
            if account not in self._parts:
                self._shares.join(account, self.parts_of(request.priority))
        heapq.heappush(self._heaps.setdefault(account, []), (latest_start_s, waiter.order, waiter))
        self._members[waiter.sequence_id] = waiter
        self._wanted.update(waiter.hashes)
        self._count(waiter, 1)

    def remove(self, sequence_id: int) -> None:
        """Takes a member out."""
        waiter = self._members.pop(sequence_id)
        for block_hash in waiter.hashes:
            self._wanted[block_hash] -= 1
            if not self._wanted[block_hash]:
                del self._wanted[block_hash]
        self._count(waiter, -1)

    def wants(self, block_hash: bytes) -> bool:
        """Whether a member will compute this block."""
        return block_hash in self._wanted

    def _count(self, waiter: Waiter, sign: int) -> None:
        account = account_of(waiter.request)
        part = self._parts.setdefault(account, Part(weight=waiter.request.weight))
        part.num_sequences += sign
        part.num_slots += sign * waiter.num_slots
        part.num_tokens += sign * waiter.num_tokens
        self.pending_tokens += sign * waiter.num_tokens
        if not part.num_sequences:
            del self._parts[account]
            self._heaps.pop(account, None)
            self._late.pop(account, None)

    def first(self, now: float, skipped: Set[int], *, with_due: bool = True) -> int | None:
        """The member to admit next, `skipped` ones left out; None when there is none. Without `with_due`, due
        members have no privilege.
        """
        aged = self._aged(now)
        if aged is not None and aged not in skipped:
            return aged
        due = self._first_due(now)
        if with_due and due is not None and due not in skipped:
            return due
        for priority in sorted({each for each, _ in self._parts}, reverse=True):
            found = self._first_of(priority, now, skipped)
            if found is not None:
                return found
        return None

    def oldest(self) -> Waiter | None:
        """The member that joined first."""
        return next(iter(self._members.values()), None)

    def admitted(self, sequence_id: int, now: float) -> bool:
        """Takes out a member that was admitted; whether it won by age, and so keeps its slot."""
        is_aged = self.is_aged_next(sequence_id, now)
        self._num_admitted += 1
        self.remove(sequence_id)
        return is_aged

    def is_aged_next(self, sequence_id: int, now: float) -> bool:
        """Whether the member is first because of its age."""
        return self._aged(now) == sequence_id

    def is_due(self, sequence_id: int, now: float) -> bool:
        """Whether the member is first because its queue limit is near."""
        return self._first_due(now) == sequence_id

    def _first_due(self, now: float) -> int | None:
        while self._due:
            due_s, _, waiter = self._due[0]
            if due_s > now:
                return None
            deadline_s = waiter.request.queue_deadline_s
            if not self._is_stale(waiter) and deadline_s is not None and deadline_s >= now:
                return waiter.sequence_id
            heapq.heappop(self._due)
        return None

    def _aged(self, now: float) -> int | None:
        if self._num_admitted % self._config.aging_interval != self._config.aging_interval - 1:
            return None
        oldest = self.oldest()
        if oldest is None or now - oldest.request.arrival_s <= self._config.aging_s:
            return None
        return oldest.sequence_id

    def _first_of(self, priority: int, now: float, skipped: Set[int]) -> int | None:
        best: tuple[tuple[float, bool, bool, float, tuple[int, int]], int] | None = None
        waiting = {tenant: part.weight for tenant, part in self.parts_of(priority).items()}
        fair = self._shares.fair_per_weight(priority, waiting)
        for tenant, weight in waiting.items():
            account = (priority, tenant)
            head, is_late = self._head(account, now, skipped)
            if head is None:
                continue
            latest_start_s, order, waiter = head
            has_more = self._shares.slots[account] > fair * weight
            key = (self._shares.band(account), has_more, is_late, latest_start_s, order)
            if best is None or key < best[0]:
                best = key, waiter.sequence_id
        return None if best is None else best[1]

    def _head(self, account: Account, now: float, skipped: Set[int]) -> tuple[_HeapItem | None, bool]:
        """The account's first, and whether it is late."""
        heap, late = self._sorted_out(account, now)
        head = self._live_head(heap, skipped)
        return (self._live_head(late, skipped), True) if head is None else (head, False)

    def _has_late(self, account: Account, now: float) -> bool:
        return self._live_head(self._sorted_out(account, now)[1], frozenset()) is not None

    def _sorted_out(self, account: Account, now: float) -> tuple[list[_HeapItem], list[_HeapItem]]:
        """The account's heaps, what is late by now in the second one."""
        heap, late = self._heaps.get(account, []), self._late.setdefault(account, [])
        while heap and -math.inf < heap[0][0] < now:
            heapq.heappush(late, heapq.heappop(heap))
        return heap, late

    def _live_head(self, heap: list[_HeapItem], skipped: Set[int]) -> _HeapItem | None:
        while heap and self._is_stale(heap[0][2]):
            heapq.heappop(heap)
        if not heap or heap[0][2].sequence_id not in skipped:
            return heap[0] if heap else None
        live = (item for item in heap if not self._is_stale(item[2]))
        return min((item for item in live if item[2].sequence_id not in skipped), default=None)

    def _is_stale(self, waiter: Waiter) -> bool:
        return self._members.get(waiter.sequence_id) is not waiter
