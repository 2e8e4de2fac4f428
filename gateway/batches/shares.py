"""Whose line is next: among tenants, and their batches behind them, work is shared by weight."""

from __future__ import annotations

from collections.abc import Callable, Collection

# How much the work of the last line counts in what the next one is expected to be.
_NEWEST = 0.1


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
