"""Tenants get their shares of what is left over."""

from __future__ import annotations

import random

import pytest

from gateway.batches.shares import FairShares


@pytest.mark.parametrize(
    "weights", [{"a": 1.0, "b": 1.0}, {"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 2.0, "c": 5.0}]
)
def test_work_is_shared_by_weight_whatever_lines_are_like(weights: dict[str, float]) -> None:
    """Within two per cent, with lines of very different length under way at a time."""
    draw = random.Random(7)
    shares = FairShares(weights.__getitem__)
    done = dict.fromkeys(weights, 0.0)
    mean = {tenant: 10.0 * 4**index for index, tenant in enumerate(weights)}
    under_way: list[tuple[str, float]] = []
    for _ in range(60_000):
        tenant = shares.choose(weights)
        under_way.append((tenant, shares.begin(tenant)))
        if len(under_way) == 16:
            tenant, expected = under_way.pop(draw.randrange(16))
            took = draw.expovariate(1 / mean[tenant])
            shares.end(tenant, expected, took)
            done[tenant] += took
    total = sum(done.values())
    for tenant, weight in weights.items():
        assert done[tenant] / total == pytest.approx(weight / sum(weights.values()), rel=0.02), done


def test_who_was_away_has_saved_nothing_up() -> None:
    shares = FairShares(lambda tenant: 1.0)
    for _ in range(1000):
        shares.end("a", shares.begin(shares.choose({"a"})), 1.0)
    chosen = []
    for _ in range(20):
        tenant = shares.choose({"a", "b"})
        shares.end(tenant, shares.begin(tenant), 1.0)
        chosen.append(tenant)
    assert 9 <= chosen.count("b") <= 11


def test_a_line_that_is_tried_again_is_not_charged() -> None:
    shares = FairShares(lambda tenant: 1.0)
    for _ in range(10):
        shares.choose({"a", "b"})
        shares.end("a", shares.begin("a"), None)
    assert shares.choose({"a", "b"}) == "a"
