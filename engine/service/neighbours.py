"""Whose work was in the way: what an engine did for other requests lately, for links between their spans.

Linking every request to all that shared a step with it would cost more than the requests. So only a request
that lost time asks, and gets the few that overlapped most with the time it lost; what is kept is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from opentelemetry.trace import Link, SpanContext

from contract.prefix import is_sampled
from engine.types import BlocksStored, KvEvent
from observability.emit import names
from observability.emit.names import Cause

# The prefix blocks that the engine holds, as its KV events reported: gateways that attach late are sent them
# all. Kept in the front, so that a snapshot costs the core nothing.

# Hashes in one event of a snapshot, and in all of it.
_HASHES_PER_EVENT = 4096
_MAX_HASHES = 262_144


class HeldBlocks:
    """Hashes of stored blocks with their parents, in the order in which they were stored."""

    def __init__(self, max_hashes: int = _MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._parents: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._parents)

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Takes changes in their order."""
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent_hash
                for block_hash in event.block_hashes:
                    self._parents[block_hash] = parent
                    parent = block_hash
            else:
                for block_hash in event.block_hashes:
                    self._parents.pop(block_hash, None)

    def snapshot(self) -> Iterator[BlocksStored]:
        """What is held as stored events, one per run of blocks. Beyond the limit the youngest are left out:
        a block is stored after the one before it, so whole prefixes remain.
        """
        run: list[int] = []
        run_parent = 0
        for number, (block_hash, parent) in enumerate(self._parents.items()):
            if number == self._max_hashes:
                break
            if run and (parent != run[-1] or len(run) == _HASHES_PER_EVENT):
                yield BlocksStored(tuple(run), run_parent)
                run = []
            if not run:
                run_parent = parent
            run.append(block_hash)
        if run:
            yield BlocksStored(tuple(run), run_parent)


def sampled(events: Iterable[KvEvent], sample: int) -> Iterator[KvEvent]:
    """The events for who hears of one in `sample` blocks; those that say nothing to him are left out."""
    for event in events:
        if sample <= 1:
            yield event
            continue
        hashes = tuple(each for each in event.block_hashes if is_sampled(each, sample))
        if hashes:
            yield msgspec.structs.replace(event, block_hashes=hashes)


# Less is not worth a link, in seconds.
_MIN_DELAY_S = 0.005
_MAX_LINKS = 3
_MAX_PREFILLS = 256
_MAX_SLOTS = 128

# Causes for which others' batch slots, or their blocks, are to blame.
_HELD_BY_OTHERS = (
    Cause.KV_PRESSURE,
    Cause.PREEMPTION,
    Cause.BATCH_FULL,
    Cause.HIGHER_TIER,
    Cause.ANSWER_PACE,
)

Interval = tuple[float, float]


class Work:
    """An interval of work for one request, in monotonic seconds; open until `end_s` is set."""

    __slots__ = ("end_s", "span", "start_s")

    def __init__(self, span: SpanContext, start_s: float, end_s: float = math.inf) -> None:
        self.span = span
        self.start_s = start_s
        self.end_s = end_s

    def overlap_s(self, times: Iterable[Interval]) -> float:
        """How much of `times` it covers."""
        return sum(max(0.0, min(self.end_s, end) - max(self.start_s, start)) for start, end in times)


class RecentWork:
    """The newest prompts that one engine computed, and the newest holders of its batch slots."""

    def __init__(self) -> None:
        self._prefills: deque[Work] = deque(maxlen=_MAX_PREFILLS)
        self._slots: deque[Work] = deque(maxlen=_MAX_SLOTS)

    def prefilled(self, span: SpanContext, start_s: float, end_s: float) -> Work:
        """A prompt was computed, and its request has a batch slot; the caller ends the returned one."""
        self._prefills.append(Work(span, start_s, end_s))
        slot = Work(span, start_s)
        self._slots.append(slot)
        return slot

    def links(
        self,
        own: SpanContext,
        delayed_by_s: Mapping[str, float],
        *,
        whole: Interval,
        waits: Sequence[Interval],
    ) -> list[Link]:
        """Links to the requests whose work overlapped most with the time that `own` lost, by cause.

        `whole` is its time in the engine, `waits` are the parts of it without a batch slot.
        """
        found: list[Link] = []
        if delayed_by_s.get(Cause.LONG_PREFILL, 0.0) >= _MIN_DELAY_S:
            found += _links(self._prefills, own, (whole,), Cause.LONG_PREFILL)
        held = max(_HELD_BY_OTHERS, key=lambda cause: delayed_by_s.get(cause, 0.0))
        if delayed_by_s.get(held, 0.0) >= _MIN_DELAY_S:
            found += _links(self._slots, own, waits, held)
        return found


def _links(work: Iterable[Work], own: SpanContext, times: Sequence[Interval], cause: Cause) -> list[Link]:
    overlaps = [
        (each.overlap_s(times), number, each.span)
        for number, each in enumerate(work)
        if each.span.trace_id != own.trace_id
    ]
    longest = sorted(overlaps, reverse=True)[:_MAX_LINKS]
    return [
        Link(span, {names.LINK_CAUSE: cause.value, names.LINK_OVERLAP_MS: overlap_s * 1000})
        for overlap_s, _, span in longest
        if overlap_s > 0
    ]
