"""Shares of the tenants of a tier: tokens that they were served, and slots of the batch that they hold.

A virtual token counter per tenant and tier (Sheng et al., "Fairness in Serving Large Language Models", OSDI
2024): every computed prompt token adds 1 / weight, every generated token `output_token_cost` / weight. Who
joins the queue starts at the lowest counter of those that wait there, so that neither idling nor a single
stream beside others' hundreds earns credit; while nobody waits, nobody is owed anything.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

# Priority of the tier and name of the tenant.
Account = tuple[int, str]


class Holder(Protocol):
    """Who holds a slot; it keeps that whatever comes if it is boosted."""

    @property
    def account(self) -> Account: ...
    @property
    def boosted(self) -> bool: ...


H = TypeVar("H", bound=Holder)


class Shares:
    """Weighted service and slots by account. A lower counter is served first; differences below `band_tokens`
    do not count.
    """

    def __init__(self, output_token_cost: float, band_tokens: int) -> None:
        self._output_token_cost = output_token_cost
        self._band_tokens = band_tokens
        self._counters: dict[Account, float] = {}
        self._num_active: Counter[Account] = Counter()
        self.slots: Counter[Account] = Counter()
        # Weights of the accounts that have slots.
        self._weights: dict[Account, float] = {}

    # Tokens.

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
            least = min(self.served((priority, tenant)) for tenant in waiting)
            self._counters[account] = max(self.served(account), least)
        else:
            self._start_over(priority)

    def _start_over(self, priority: int) -> None:
        self._counters = {key: value for key, value in self._counters.items() if key[0] != priority}

    def charge(self, account: Account, weight: float, prompt_tokens: int, output_tokens: int) -> None:
        """Adds service to an active account."""
        if account in self._num_active:
            cost = prompt_tokens + self._output_token_cost * output_tokens
            self._counters[account] = self.served(account) + cost / weight

    def charge_steps(self, account: Account, weights: Sequence[float], num_steps: int) -> None:
        """So many steps that gave one generated token to each of the account's requests with these weights:
        to the last bit what `charge` adds up to.
        """
        if account not in self._num_active:
            return
        costs, served = [self._output_token_cost / weight for weight in weights], self.served(account)
        if served.is_integer() and all(map(float.is_integer, costs)):
            served += num_steps * math.fsum(costs)
        else:
            for _ in range(num_steps):
                for cost in costs:
                    served += cost
        self._counters[account] = served

    def served(self, account: Account) -> float:
        """Weighted tokens served."""
        return self._counters.get(account, 0.0)

    def band(self, account: Account) -> float:
        """How far the account is ahead of the least served active one of its tier, in bands."""
        floor = min((self.served(key) for key in self._num_active if key[0] == account[0]), default=0.0)
        return (self.served(account) - floor) // self._band_tokens

    # Slots.

    def acquire(self, account: Account, weight: float) -> None:
        """A sequence of the account starts running."""
        self.slots[account] += 1
        self._weights[account] = weight

    def release(self, account: Account) -> None:
        """One of the account's running sequences stops."""
        self.slots[account] -= 1
        if not self.slots[account]:
            del self.slots[account], self._weights[account]

    def _holders(self, priority: int) -> list[Account]:
        """Accounts of the tier with slots, those that hold most for their weight first."""
        found = (account for account in self.slots if account[0] == priority)
        return sorted(found, key=lambda each: -self.slots[each] / self._weights[each])

    def fair_per_weight(self, priority: int, waiting: Mapping[str, float]) -> float:
        """Slots for one unit of weight, if what the tier holds were shared among all that hold or wait;
        `waiting` has the weights of those that wait.
        """
        weights = {tenant: self._weights[priority, tenant] for _, tenant in self._holders(priority)}
        held = sum(self.slots[priority, tenant] for tenant in weights)
        return held / sum({**weights, **waiting}.values()) if held else 0.0

    def donors(self, account: Account, weight: float) -> Iterator[tuple[Account, int]]:
        """Who of the tier gives slots up to the account, who holds most first, and how many: those that were
        served no less, before they hold less for their weight than the account does with one more than now.
        """
        fair, band = (self.slots[account] + 1) / weight, self.band(account)
        for holder in self._holders(account[0]):
            if holder != account and band <= self.band(holder):
                yield holder, max(0, int(self.slots[holder] - fair * self._weights[holder]))

    def victims(
        self, account: Account, weight: float, running: Sequence[H], may_go: Callable[[H], bool]
    ) -> Iterator[H]:
        """Who of those that run, in order of rank, makes room for one more of the account, the first to go
        first: lower tiers; then the newest of the donors of its own.
        """
        equals: dict[Account, list[H]] = {}
        for holder in reversed(running):
            if holder.boosted or holder.account[0] > account[0]:
                break
            if not may_go(holder):
                continue
            if holder.account[0] < account[0]:
                yield holder
            else:
                equals.setdefault(holder.account, []).append(holder)
        if len(equals) > (account in equals):
            for donor, num_slots in self.donors(account, weight):
                yield from equals.get(donor, [])[:num_slots]
