"""Tenants' accounts of processor time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tokenizer_svc.workers.accounts import Accounts


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_who_uses_too_much_is_in_debt_until_it_has_grown_back() -> None:
    clock = Clock()
    accounts = Accounts(clock)
    allowance_s = accounts.left_s("a")
    accounts.charge("a", allowance_s / 2)
    assert not accounts.in_debt("a")
    accounts.charge("a", allowance_s)
    assert accounts.in_debt("a")
    assert not accounts.in_debt("b")
    clock.now_s += 60
    assert not accounts.in_debt("a")
    clock.now_s += 60
    assert accounts.left_s("a") == allowance_s


def test_what_is_gently_lowered_ends_before_the_allowance() -> None:
    clock = Clock()
    accounts = Accounts(clock)
    gentle_s = accounts.gentle_s("a")
    assert 0 < gentle_s < accounts.left_s("a")
    accounts.charge("a", gentle_s)
    assert accounts.gentle_s("a") <= 0
    assert not accounts.in_debt("a")
    clock.now_s += 60
    assert accounts.gentle_s("a") == gentle_s


@given(charges=st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1e6), st.floats(0, 100))))
def test_debts_end_after_a_minute_and_are_forgotten(charges: list[tuple[str, float, float]]) -> None:
    clock = Clock()
    accounts = Accounts(clock)
    allowance_s = accounts.left_s("d")
    for tenant, used_s, passed_s in charges:
        accounts.charge(tenant, used_s)
        assert accounts.left_s(tenant) <= allowance_s
        clock.now_s += passed_s
    clock.now_s += 61
    assert not any(map(accounts.in_debt, "abcd"))
    clock.now_s += 61
    accounts.prune()
    assert not accounts._left
