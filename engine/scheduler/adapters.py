"""Which adapter is in which slot: at most so many compute at the same time, and the others take turns.

An adapter comes into a free slot, or into that of the adapter that was used least recently of those that
nobody computes with. Where all are in use, the first in the order of the queue claims one: who waits for the
adapter in it stays where it is until the claimant had its turn, and who runs with it goes on to its end. So
no adapter keeps a slot for as long as requests for it come.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol


class AdapterLoader(Protocol):
    """What brings adapters into slots while steps run."""

    def begin(self, slot: int, name: str) -> None:
        """Begins to load an adapter into a slot that nobody computes with."""

    def finished(self) -> list[tuple[int, str]]:
        """Slots that are loaded since the last call, each with why that failed, else ""."""


@dataclass(slots=True)
class _Slot:
    index: int
    name: str = ""
    is_ready: bool = False
    # When it came, and when it was asked for last, in asks.
    since: int = 0
    used: int = 0
    # The adapter that is loaded into this slot next.
    claimed_by: str = ""


class AdapterSlots:
    """The slots of one engine; without a loader there are none."""

    def __init__(self, num_slots: int = 0, loader: AdapterLoader | None = None) -> None:
        self._slots = [_Slot(index) for index in range(num_slots)]
        self._loader = loader
        self._by_name: dict[str, _Slot] = {}
        self._num_asks = 0
        # Claims hold while their adapters are asked for.
        self._asked: set[str] = set()
        # Adapters that are in slots.
        self.names: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether an adapter is on its way, or a slot is claimed."""
        return any(slot.claimed_by or (slot.name and not slot.is_ready) for slot in self._slots)

    def slot_of(self, name: str) -> int:
        """Where an adapter is that `admits` said yes to."""
        return self._by_name[name].index

    def begin_step(self) -> dict[str, str]:
        """Takes in what was loaded since the last step; returns adapters that could not be, with why."""
        failed = {}
        for index, problem in self._loader.finished() if self._loader else ():
            slot = self._slots[index]
            if problem:
                failed[slot.name] = problem
                self._empty(slot)
            else:
                slot.is_ready = True
        for slot in self._slots:
            if slot.claimed_by and slot.claimed_by not in self._asked:
                slot.claimed_by = ""
        self._asked.clear()
        self.names = tuple(slot.name for slot in self._slots if slot.is_ready)
        return failed

    def expect(self, name: str) -> None:
        """A request for an adapter was accepted: it is brought into a free slot, if there is one."""
        if name not in self._by_name:
            free = next((slot for slot in self._slots if not slot.name), None)
            if free is not None:
                self._load(free, name)

    def admits(self, name: str, in_use: Collection[str]) -> bool:
        """Whether a sequence of an adapter may begin now; else the adapter is brought, or waits for a slot.
        Steps compute with those `in_use`.
        """
        self._num_asks += 1
        self._asked.add(name)
        slot = self._by_name.get(name)
        if slot is not None:
            slot.used = self._num_asks
            return slot.is_ready and not slot.claimed_by
        slot = next((each for each in self._slots if each.claimed_by == name), None)
        if slot is None:
            idle = (each for each in self._slots if not each.claimed_by and self._is_idle(each, in_use))
            slot = min(idle, key=attrgetter("used"), default=None)
        if slot is not None and self._is_idle(slot, in_use):
            self._load(slot, name)
        elif slot is None:
            # The one whose turn has lasted longest.
            others = (each for each in self._slots if not each.claimed_by and each.is_ready)
            victim = min(others, key=attrgetter("since"), default=None)
            if victim is not None:
                victim.claimed_by = name
        return False

    def _is_idle(self, slot: _Slot, in_use: Collection[str]) -> bool:
        return not slot.name or (slot.is_ready and slot.name not in in_use)

    def _load(self, slot: _Slot, name: str) -> None:
        assert self._loader is not None, f"nothing loads adapter {name!r}"
        self._empty(slot)
        slot.name, slot.used, slot.since = name, self._num_asks, self._num_asks
        self._by_name[name] = slot
        self._loader.begin(slot.index, name)

    def _empty(self, slot: _Slot) -> None:
        self._by_name.pop(slot.name, None)
        slot.name, slot.is_ready, slot.claimed_by = "", False, ""
        self.names = tuple(slot.name for slot in self._slots if slot.is_ready)

    def check_invariants(self, in_use: Collection[str]) -> None:
        """Raises AssertionError with the first thing that does not add up."""
        assert self._by_name == {slot.name: slot for slot in self._slots if slot.name}, "slots by name"
        ready = set(self.names)
        assert ready >= set(in_use), f"adapters {sorted(set(in_use) - ready)} compute from no slot"
        claims = [slot.claimed_by for slot in self._slots if slot.claimed_by]
        assert len(claims) == len(set(claims)), f"an adapter claims two slots: {claims}"
