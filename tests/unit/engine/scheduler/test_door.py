"""The door under three and six times the load, under a virtual clock: what is accepted is kept, and fair."""

from __future__ import annotations

import pytest

from benchmarks.door import Asked, full_door_tokens, retry_ratios, virtual


def of_tier(asked: list[Asked], tier: str) -> list[Asked]:
    return [each for each in asked if each.tier == tier]


def goodput(asked: list[Asked]) -> float:
    accepted = [each for each in asked if each.accepted]
    return sum(each.good for each in accepted) / len(accepted)


@pytest.mark.parametrize(("load", "near"), [(3.0, 0.75), (6.0, 0.45)])
def test_what_is_accepted_meets_its_target_and_what_is_refused_is_told_when(load: float, near: float) -> None:
    asked = virtual(load, 60.0)
    assert goodput(of_tier(asked, "gold")) >= 0.99
    assert goodput(of_tier(asked, "silver")) >= 0.9
    assert all(each.tokens for each in asked if each.accepted), "nothing that was accepted is dropped"
    refused = [each for each in asked if not each.accepted]
    assert refused
    assert all(0.5 <= (each.retry_after_s or 0.0) <= 60.0 for each in refused)
    ratios = retry_ratios(of_tier(asked, "silver"))
    assert sum(0.5 <= each <= 2.0 for each in ratios) >= near * len(ratios)


def test_equal_tenants_of_unequal_clients_are_accepted_alike_where_both_want_more() -> None:
    tokens = full_door_tokens(of_tier(virtual(6.0, 60.0), "silver"))
    assert tokens["many"] == pytest.approx(tokens["few"], rel=0.1)


def test_one_queue_keeps_nothing() -> None:
    asked = virtual(3.0, 60.0, one_queue=True)
    assert goodput(asked) < 0.2
