"""Fairness between tenants by the tokens that they were served.

A virtual token counter per tenant and tier (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): every computed prompt token adds 1 / weight, every generated token `output_token_cost` / weight. Who
comes back from idleness starts at the lowest counter of the active tenants, so that idling earns no credit.
"""

from __future__ import annotations

# Priority of the tier and name of the tenant.
Account = tuple[int, str]


class VirtualTokenCounters:
    """Weighted service per account; a lower counter is served first."""

    def __init__(self, output_token_cost: float) -> None:
        self._output_token_cost = output_token_cost
        self._counters: dict[Account, float] = {}
        self._num_active: dict[Account, int] = {}

    def enter(self, account: Account) -> None:
        """One more request of the account is waiting or running."""
        active = self._num_active.get(account, 0)
        if active == 0:
            self._counters[account] = max(self.counter(account), self.floor(account[0]))
        self._num_active[account] = active + 1

    def leave(self, account: Account) -> None:
        """One request of the account has ended."""
        active = self._num_active[account] - 1
        if active:
            self._num_active[account] = active
            return
        del self._num_active[account]
        priority = account[0]
        if not any(other[0] == priority for other in self._num_active):
            # Nobody is active, so nobody is owed anything: the tier's counters start over.
            self._counters = {key: value for key, value in self._counters.items() if key[0] != priority}

    def charge(self, account: Account, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Adds service to an active account."""
        if account in self._num_active:
            cost = prompt_tokens + self._output_token_cost * output_tokens
            self._counters[account] += cost / weight

    def counter(self, account: Account) -> float:
        """Weighted tokens served."""
        return self._counters.get(account, 0.0)

    def floor(self, priority: int) -> float:
        """Lowest counter of the tier's active accounts."""
        counters = (self._counters[key] for key in self._num_active if key[0] == priority)
        return min(counters, default=0.0)
