"""Lines get what is left over, and tenants their shares of it."""

from __future__ import annotations

import random

import pytest

from gateway.batches.shares import FairShares, LineWindow


def idle(window: LineWindow, now_s: float, num_engines: int = 1) -> None:
    window.look(now_s, num_engines=num_engines, others_run=False, others_wait=False, queued=False)


def test_a_window_grows_while_nobody_else_asks_up_to_so_many_for_each_engine() -> None:
    window = LineWindow(8)
    idle(window, 0.0)
    assert window.has_room(0)
    assert not window.has_room(1)
    for _ in range(100):
        window.ended()
    assert window.size == 8
    window.look(0.5, num_engines=1, others_run=True, others_wait=False, queued=False)
    assert window.has_room(1)
    assert not window.has_room(2)
    idle(window, 1.0, num_engines=2)
    for _ in range(100):
        window.ended()
    assert window.size == 16
    idle(window, 2.0, num_engines=0)
    assert not window.has_room(0)


def test_a_window_is_halved_while_others_wait_and_grows_slowly_afterwards() -> None:
    window = LineWindow(32)
    idle(window, 0.0)
    for _ in range(100):
        window.ended()
    window.look(1.0, num_engines=1, others_run=True, others_wait=True, queued=False)
    # Beside others there is a quarter, and half of that where they wait.
    assert window.size == 4
    window.look(1.1, num_engines=1, others_run=True, others_wait=True, queued=False)
    assert window.size == 4
    for now_s in range(2, 12):
        window.look(now_s, num_engines=1, others_run=True, others_wait=True, queued=False)
        window.ended()
    # One at a time goes on: a batch is not starved for ever.
    assert window.size == 1
    idle(window, 20.0)
    window.ended()
    window.ended()
    assert window.size < 3


def test_a_window_does_not_grow_into_a_queue() -> None:
    window = LineWindow(32)
    window.look(0.0, num_engines=1, others_run=False, others_wait=False, queued=True)
    for _ in range(100):
        window.ended()
    assert window.size == 1


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
