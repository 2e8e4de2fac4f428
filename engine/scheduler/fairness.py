"""Fairness between the tenants of a tier: by the tokens that they were served, and by the places they hold.

A virtual token counter per tenant and tier (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): every computed prompt token adds 1 / weight, every generated token `output_token_cost` / weight. Who
joins the queue starts at the lowest counter of those that wait there, so that neither idling nor a single
stream beside others' hundreds earns credit; while nobody waits, nobody is owed anything.

Counters decide who is next, and a place is held for as long as an answer is. So places are shared as well, by
weight: every branch of a request (choices, candidates of best_of, beams) holds one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

# Priority of the tier and name of the tenant.
Account = tuple[int, str]


class VirtualTokenCounters:
    """Weighted service per account; a lower counter is served first. Differences below `band_tokens` do not
    count.
    """

    def __init__(self, output_token_cost: float, band_tokens: int) -> None:
        self._output_token_cost = output_token_cost
        self._band_tokens = band_tokens
        self._counters: dict[Account, float] = {}
        self._num_active: Counter[Account] = Counter()

    def enter(self, account: Account) -> None:
        """One more request of the account is waiting or running."""
        self._num_active[account] += 1

    def leave(self, account: Account) -> None:
        """One request of the account has ended."""
        self._num_active[account] -= 1
        if not self._num_active[account]:
            del self._num_active[account]
            if not any(other[0] == account[0] for other in self._num_active):
                self._start_over(account[0])

    def join(self, account: Account, waiting: Collection[str]) -> None:
        """The account begins to wait, beside these tenants of its tier."""
        priority = account[0]
        if waiting:
            least = min(self.counter((priority, tenant)) for tenant in waiting)
            self._counters[account] = max(self.counter(account), least)
        else:
            self._start_over(priority)

    def _start_over(self, priority: int) -> None:
        self._counters = {key: value for key, value in self._counters.items() if key[0] != priority}

    def charge(self, account: Account, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Adds service to an active account."""
        if account in self._num_active:
            cost = prompt_tokens + self._output_token_cost * output_tokens
            self._counters[account] = self.counter(account) + cost / weight

    def counter(self, account: Account) -> float:
        """Weighted tokens served."""
        return self._counters.get(account, 0.0)

    def band(self, account: Account) -> float:
        """How far the account is ahead of the least served active one of its tier, in bands."""
        floor = min((self.counter(key) for key in self._num_active if key[0] == account[0]), default=0.0)
        return (self.counter(account) - floor) // self._band_tokens


class Places:
    """Places in the batch, by account."""

    def __init__(self) -> None:
        self._held: Counter[Account] = Counter()
        self._weights: dict[Account, float] = {}

    def take(self, account: Account, weight: float) -> None:
        """A sequence of the account starts running."""
        self._held[account] += 1
        self._weights[account] = weight

    def give(self, account: Account) -> None:
        """One of the account's running sequences stops."""
        self._held[account] -= 1
        if not self._held[account]:
            del self._held[account], self._weights[account]

    def held(self, account: Account) -> int:
        """Places of the account."""
        return self._held[account]

    def holders(self, priority: int) -> list[Account]:
        """Accounts of the tier with places, those that hold most for their weight first."""
        found = (account for account in self._held if account[0] == priority)
        return sorted(found, key=lambda each: -self._held[each] / self._weights[each])

    def fair_per_weight(self, priority: int, waiting: Mapping[str, float]) -> float:
        """Places for one unit of weight, if what the tier holds were shared among all that hold or wait;
        `waiting` has the weights of those that wait.
        """
        weights = {tenant: self._weights[priority, tenant] for _, tenant in self.holders(priority)}
        held = sum(self._held[priority, tenant] for tenant in weights)
        return held / sum({**weights, **waiting}.values()) if held else 0.0

    def spare(self, account: Account, other: Account, other_weight: float) -> int:
        """Places that the account can give up before it holds less for its weight than `other` does with one
        more than now.
        """
        fair = (self._held[other] + 1) / other_weight * self._weights[account]
        return max(0, int(self._held[account] - fair))
