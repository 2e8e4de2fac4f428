"""How many lines may be under way, and whose line is next.

Lines run in what capacity is left: there are few of them while somebody waits at a connection, and more each
time that nobody did. Among tenants, and their batches behind them, work is shared by weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

# Lines for each engine while others' requests run there; as many as max_in_flight where none does.
_BESIDE_OTHERS = 0.25
# After the number of lines was halved nothing is done about it for so long: those under way end meanwhile.
_HOLD_S = 0.5
# How much the work of the last line counts in what the next one is expected to be.
_NEWEST = 0.1


class LineWindow:
    """Lines that may be under way at a time."""

    def __init__(self, max_per_engine: int) -> None:
        self._max_per_engine = max_per_engine
        self._most = float(max_per_engine)
        self._held_until_s = 0.0
        # Grows with every line until somebody waits for the first time, then by one in the time of a line.
        self._is_first = True
        self._may_grow = True
        self.size = 1.0

    def look(
        self, now_s: float, *, num_engines: int, others_run: bool, others_wait: bool, queued: bool
    ) -> None:
        """What there is now: engines, requests of others that run or wait for their first token there, and
        a queue in front of an engine, in which further lines would only stand.
        """
        share = _BESIDE_OTHERS if others_run else 1.0
        self._most = max(1.0, self._max_per_engine * share) * num_engines
        self._may_grow = not (others_wait or queued)
        if others_wait and now_s >= self._held_until_s:
            self._held_until_s = now_s + _HOLD_S
            self._is_first = False
            self.size = max(1.0, min(self.size, self._most) / 2)

    def ended(self) -> None:
        """A line has ended."""
        if self._may_grow:
            grown = self.size + (1.0 if self._is_first else 1.0 / self.size)
            # What it had before others came it has again when they are gone.
            self.size = max(self.size, min(grown, self._most))

    def has_room(self, num_under_way: int) -> bool:
        """Whether another line may begin."""
        return num_under_way < int(min(self.size, self._most))


class FairShares:
    """Whose turn it is: of those who want one, whoever has had the least work for its weight.

    A line is charged what one of its tenant took lately when it begins, and what it took when it ends
    (start-time fair queueing, Goyal et al. 1996). Who comes back has saved nothing up.
    """

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._work: dict[str, float] = {}
        self._expected: dict[str, float] = {}
        # Of whoever was chosen last, when it was.
        self._floor = 0.0
        self._active: set[str] = set()

    def choose(self, tenants: Collection[str]) -> str:
        """The next one of these, which are all that want one."""
        for tenant in tenants:
            if tenant not in self._active:
                self._work[tenant] = max(self._work.get(tenant, 0.0), self._floor)
        self._active = set(tenants)
        chosen = min(tenants, key=lambda tenant: (self._work[tenant], tenant))
        self._floor = max(self._floor, self._work[chosen])
        return chosen

    def begin(self, tenant: str) -> float:
        """Charges a line that begins; what it is expected to take."""
        expected = self._expected.get(tenant, 1.0)
        self._add(tenant, expected)
        return expected

    def end(self, tenant: str, expected: float, took: float | None) -> None:
        """Corrects the charge of a line; None where it took nothing, and will be tried again."""
        self._add(tenant, (took or 0.0) - expected)
        if took is not None:
            before = self._expected.get(tenant, took)
            self._expected[tenant] = before + _NEWEST * (took - before)

    def _add(self, tenant: str, work: float) -> None:
        self._work[tenant] = self._work.get(tenant, self._floor) + work / self._weight(tenant)

    def forget(self, tenant: str) -> None:
        """A tenant has no batch any more."""
        self._work.pop(tenant, None)
        self._expected.pop(tenant, None)
        self._active.discard(tenant)
