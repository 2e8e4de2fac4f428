"""Whose turn it is at a door that cannot take everybody, and when it will be: tickets of those who went away.

Which request it was is known by a hash of its prompt, since nobody who comes back has another name. Nothing
travels to the client, so there is nothing to forge; who comes with more requests fills the line of its own
tenant alone. Not everybody comes back: what a tenant's tickets count for is the share of them that was used
lately. Between tenants, whoever was accepted less goes first, back or not; tokens of accepted requests are
counted as service is (see shares), so that who asks oftener is not accepted more.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from operator import attrgetter
from typing import NamedTuple

from engine.policy.rates import EventRate
from engine.policy.shares import Account

# How long after it is due a ticket is open, in seconds: many clients wait for whole seconds.
OPEN_S = 2.5
# Weight of the newest ticket in the share of those that are used.
_ALPHA = 0.05
# Least and longest time that a slot is believed to take, in seconds.
_SHORTEST_S, _LONGEST_S = 0.001, 60.0
# Tickets of one account; whoever is refused beyond them has none.
_MOST = 1024
# Requests by which an account was accepted more than another one when it makes way: fewer are chance.
_CLEARLY = 3
# Seconds over which a rate is averaged: long, because slow engines admit about one request a second.
_MEMORY_S = 30.0

_due_s = attrgetter("due_s")


class _Ticket(NamedTuple):
    """One request that was refused."""

    # Moment for which its return was announced.
    due_s: float
    # When it was first refused: its rank in the line.
    first_s: float
    # Hash of the prompt.
    prompt: int
    # Slots that it takes.
    num_slots: int


class _Line:
    """What is kept of one account whose requests are refused."""

    def __init__(self) -> None:
        # In order.
        self.tickets: list[_Ticket] = []
        # Share of tickets that are used.
        self.share = 1.0
        # Slots accepted per second while others had to go away.
        self.rate = EventRate(_MEMORY_S, running=False)
        # Weighted tokens of accepted requests.
        self.accepted = 0.0

    def advance(self, now: float) -> None:
        """Drops tickets that nobody came back with."""
        num_lost = bisect_right(self.tickets, now - OPEN_S, key=_due_s)
        del self.tickets[:num_lost]
        self.share *= (1 - _ALPHA) ** num_lost
        self.rate.run(now, running=bool(self.tickets))

    def num_due(self, now: float) -> int:
        """Tickets that are due."""
        return bisect_right(self.tickets, now, key=_due_s)

    def due(self, prompt: int, now: float) -> _Ticket | None:
        """The ticket of this prompt that is due."""
        return next((each for each in self.tickets[: self.num_due(now)] if each.prompt == prompt), None)

    def use(self, ticket: _Ticket) -> None:
        """Takes out a ticket that somebody came back with."""
        self.tickets.remove(ticket)
        self.share += _ALPHA * (1 - self.share)


class Tickets:
    """Tickets of all accounts, and what they were accepted."""

    def __init__(self) -> None:
        # Tickets of accounts that were refused, until all have expired.
        self._lines: dict[Account, _Line] = {}

    def is_back(self, account: Account, prompt: int, now: float) -> bool:
        """Whether this request's return was announced for now."""
        line = self._lines.get(account)
        return line is not None and line.due(prompt, now) is not None

    def open_slots(self, priority: int, now: float) -> dict[str, float]:
        """Slots that requests of the tier take that were to return by now, and will, by tenant."""
        found = {}
        for account, line in list(self._lines.items()):
            line.advance(now)
            if not line.tickets and not line.rate.is_fresh:
                del self._lines[account]
            elif account[0] == priority and (num_due := line.num_due(now)):
                found[account[1]] = line.share * sum(each.num_slots for each in line.tickets[:num_due])
        return found

    def wait_s(self, priority: int, num_slots: float, now: float, usual_s: float) -> float:
        """How long so many slots of the tier take at the rate at which it got them lately, while some were
        sent away to return; `usual_s` as far as none was measured.
        """
        lines = [line for account, line in self._lines.items() if account[0] == priority]
        if not usual_s or not any(line.rate.is_fresh for line in lines):
            return usual_s
        prior_per_s = num_slots / usual_s / len(lines)
        return num_slots / sum(line.rate.per_s(now, prior_per_s=prior_per_s) for line in lines)

    def line_s(
        self, account: Account, prompt: int, num_tokens: float, now: float, interval_s: float
    ) -> float:
        """How long those take who will be back and go before a request of so many weighted tokens a slot: of
        its account, and of others that were accepted less. `interval_s` is the time that a slot of the
        account takes, as far as none was measured.
        """
        line = self._lines.get(account)
        if line is None:
            return 0.0
        later, own = line.tickets[line.num_due(now) :], line.due(prompt, now)
        if own is not None:
            # Also those that are due and have not come yet.
            later = [each for each in line.tickets if each.first_s < own.first_s]
        num_slots = line.share * sum(each.num_slots for each in later)
        if own is None:
            num_slots += self._lead(account, line) / num_tokens
        prior_per_s = 1 / min(max(interval_s, _SHORTEST_S), _LONGEST_S)
        return num_slots / line.rate.per_s(now, prior_per_s=prior_per_s)

    def leads(self, account: Account, num_tokens: float) -> bool:
        """Whether the account was accepted clearly more than another one that is refused: by some requests of
        so many weighted tokens a slot.
        """
        line = self._lines.get(account)
        return line is not None and self._lead(account, line) > _CLEARLY * num_tokens

    def _lead(self, account: Account, line: _Line) -> float:
        """Weighted tokens by which the account was accepted more than another one that is refused."""
        tier = (each for key, each in self._lines.items() if key[0] == account[0])
        least = min((each.accepted for each in tier if each.tickets), default=math.inf)
        return max(0.0, line.accepted - least)

    def accept(self, account: Account, prompt: int, num_slots: int, num_tokens: float, now: float) -> None:
        """A request of so many weighted tokens a slot was accepted; its ticket is used, if it had one."""
        line = self._lines.get(account)
        if line is not None:
            own = line.due(prompt, now)
            if own is not None:
                line.use(own)
            line.rate.count(now, num_slots)
            line.accepted += num_slots * num_tokens

    def refuse(self, account: Account, prompt: int, num_slots: int, due_s: float, now: float) -> None:
        """A request was sent away, to return later."""
        line = self._lines.setdefault(account, _Line())
        own = line.due(prompt, now)
        if own is not None:
            line.use(own)
        elif not line.tickets:
            self._join(account, line)
        if len(line.tickets) < _MOST:
            insort(line.tickets, _Ticket(due_s, own.first_s if own else now, prompt, num_slots))
        line.advance(now)

    def _join(self, account: Account, line: _Line) -> None:
        """The account begins to be refused, beside others that are: nobody is owed what was before."""
        tier = [each for key, each in self._lines.items() if key[0] == account[0]]
        least = min((each.accepted for each in tier if each.tickets), default=None)
        if least is None:
            for each in tier:
                each.accepted = 0.0
        else:
            line.accepted = max(line.accepted, least)
