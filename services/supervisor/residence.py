"""Which models are in memory: what is asked for comes in, what was not used for longest makes room.

Decisions only: no process, no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

# After so long, a request for a model takes the place of one that is in use: its requests in flight end
# first, and later ones wait.
PATIENCE_S = 5.0


@dataclass(kw_only=True)
class Resident:
    """One model, in memory or not. Times are seconds of one clock."""

    key: str
    # By its memory plan.
    num_bytes: int
    # Without a request for so long, it is unloaded; 0 is never.
    idle_unload_s: float = 0.0
    state: Literal["unloaded", "loading", "loaded", "unloading"] = "unloaded"
    num_waiting: int = 0
    num_open: int = 0
    # Since when somebody waits, or it was used last, or loaded; and before when it is not loaded again.
    waiting_since_s: float = 0.0
    used_s: float = 0.0
    loaded_s: float = 0.0
    retry_s: float = 0.0
    # It is not served any more.
    is_leaving: bool = False

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it, or is about to."""
        return not self.num_open and not self.num_waiting

    def asked(self, num_waiting: int, num_open: int, now: float) -> None:
        """What gateways say, all together."""
        if num_waiting and not self.num_waiting:
            self.waiting_since_s = now
        if num_waiting or num_open or not self.is_idle:
            self.used_s = now
        self.num_waiting, self.num_open = num_waiting, num_open


class Move(NamedTuple):
    """What is to be begun."""

    what: Literal["load", "unload"]
    resident: Resident


def next_moves(
    residents: Collection[Resident], *, budget_bytes: int, max_loaded: int, now: float
) -> Iterator[Move]:
    """What to begin now. `max_loaded` models at the same time, in `budget_bytes`; 0 is no limit of its own.

    Who waits longest is first; a model that fits without another's leaving goes ahead of one that does not.
    """
    held = [each for each in residents if each.state != "unloaded"]
    room = _Room(held, budget_bytes, max_loaded)
    leaving: set[str] = set()
    for each in held:
        is_over = each.idle_unload_s and now - each.used_s >= each.idle_unload_s
        is_over = is_over or each.is_leaving
        if each.state == "loaded" and each.is_idle and is_over:
            leaving.add(each.key)
            yield Move("unload", each)
    waiting = [
        each for each in residents if each.state == "unloaded" and each.num_waiting and not each.is_leaving
    ]
    may_evict = True
    for wanted in sorted(waiting, key=lambda each: each.waiting_since_s):
        if now < wanted.retry_s:
            continue
        if room.takes(wanted):
            room.add(wanted)
            yield Move("load", wanted)
        elif may_evict:
            # One at a time: who comes next may be served by the same room.
            may_evict = False
            for victim in _victims(wanted, held, leaving, room, now):
                leaving.add(victim.key)
                yield Move("unload", victim)
            if now - wanted.waiting_since_s >= PATIENCE_S:
                # What comes free is for the one that waits longest.
                return


class _Room:
    """What is taken, with what is on its way in or out."""

    def __init__(self, held: Collection[Resident], budget_bytes: int, max_loaded: int) -> None:
        self._budget_bytes = budget_bytes
        self._max_loaded = max_loaded
        self.num_bytes = sum(each.num_bytes for each in held)
        self.count = len(held)

    def takes(self, wanted: Resident, *, without: Collection[Resident] = ()) -> bool:
        num_bytes = self.num_bytes + wanted.num_bytes - sum(each.num_bytes for each in without)
        count = self.count + 1 - len(without)
        return (not self._budget_bytes or num_bytes <= self._budget_bytes) and (
            not self._max_loaded or count <= self._max_loaded
        )

    def add(self, wanted: Resident) -> None:
        self.num_bytes += wanted.num_bytes
        self.count += 1


def _victims(
    wanted: Resident, held: Collection[Resident], leaving: Collection[str], room: _Room, now: float
) -> list[Resident]:
    """Who makes room, beside those that leave already; nobody where that is not enough, or too early."""
    gone = [each for each in held if each.state == "unloading" or each.key in leaving]
    if room.takes(wanted, without=gone):
        return []
    loaded = [each for each in held if each.state == "loaded" and each.key not in leaving]
    idle = sorted((each for each in loaded if each.is_idle), key=lambda each: each.used_s)
    candidates = idle
    if now - wanted.waiting_since_s >= PATIENCE_S:
        candidates = idle + sorted(
            (each for each in loaded if not each.is_idle and now - each.loaded_s >= PATIENCE_S),
            key=lambda each: each.loaded_s,
        )
    chosen: list[Resident] = []
    for victim in candidates:
        chosen.append(victim)
        if room.takes(wanted, without=[*gone, *chosen]):
            return chosen
    return []
