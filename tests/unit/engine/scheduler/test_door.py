"""The door under three and six times the load, under a virtual clock: what is accepted is kept, and fair."""

from __future__ import annotations

import functools

import pytest

from benchmarks.door import DEVICES, Asked, full_door_tokens, kept_ratio, retry_ratios, virtual
from benchmarks.engine.virtual import Arrival, Device, simulate
from engine.config import SchedulerConfig


def of_tier(asked: list[Asked], tier: str) -> list[Asked]:
    return [each for each in asked if each.tier == tier]


def goodput(asked: list[Asked]) -> float:
    accepted = [each for each in asked if each.accepted]
    return sum(each.good for each in accepted) / len(accepted)


# About as many answers of a place on either.
SECONDS = {"fast": 60.0, "slow": 240.0}


@functools.cache
def served(load: float, seed: int, device: str = "fast") -> list[Asked]:
    return virtual(load, SECONDS[device], seed=seed, device=DEVICES[device])


@pytest.mark.parametrize(
    ("load", "seed", "device"),
    [(3.0, 0, "fast"), (6.0, 0, "fast"), (6.0, 1, "fast"), (3.0, 0, "slow"), (6.0, 1, "slow")],
)
def test_what_is_accepted_meets_its_target_and_what_is_refused_is_told_its_turn(
    load: float, seed: int, device: str
) -> None:
    asked = served(load, seed, device)
    assert goodput(of_tier(asked, "gold")) >= 0.99
    assert goodput(of_tier(asked, "silver")) >= 0.9
    assert all(each.tokens for each in asked if each.accepted), "nothing that was accepted is dropped"
    refused = [each for each in asked if not each.accepted]
    assert refused
    assert all(0.5 <= (each.retry_after_s or 0.0) <= 60.0 for each in refused)
    ratios = retry_ratios(of_tier(asked, "silver"), SECONDS[device])
    assert sum(0.5 <= each <= 2.0 for each in ratios) >= 0.8 * len(ratios)
    # Who comes back as told is taken in; without turns, one in ten is.
    assert kept_ratio(of_tier(asked, "silver"), SECONDS[device]) >= (0.6 if device == "fast" else 0.4)


@pytest.mark.parametrize(("seed", "device"), [(0, "fast"), (1, "fast"), (0, "slow"), (1, "slow")])
def test_equal_tenants_of_unequal_clients_are_accepted_alike_where_both_want_more(
    seed: int, device: str
) -> None:
    tokens = full_door_tokens(of_tier(served(6.0, seed, device), "silver"))
    assert tokens["many"] == pytest.approx(tokens["few"], rel=0.07)


def test_one_queue_keeps_nothing() -> None:
    asked = virtual(3.0, 60.0, one_queue=True)
    assert goodput(asked) < 0.2


@pytest.mark.parametrize(("num_requests", "num_choices"), [(1, 64), (64, 1)])
def test_sixty_four_long_branches_leave_an_equal_tenant_its_half(num_requests: int, num_choices: int) -> None:
    wide = Arrival(0.0, 64, 1500, "wide", "wide", n=64)
    equal = [Arrival(5.0, 64, 1500, "equal", "equal", n=num_choices) for _ in range(num_requests)]
    served = simulate([wide, *equal], SchedulerConfig(), Device(step_s=0.04), stop_s=50.0).served
    assert min(each.ttft_s or 99.0 for each in served[1:]) <= 1.0
    tokens = [
        sum(at > 5.0 for each in part for at in each.token_times_s) for part in (served[:1], served[1:])
    ]
    assert tokens[1] == pytest.approx(sum(tokens) / 2, rel=0.1)
