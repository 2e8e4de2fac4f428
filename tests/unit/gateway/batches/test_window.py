"""Lines get what is left over: many where nobody else asks, few where they would make others' tokens late."""

from __future__ import annotations

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.batches.mark import AskedMark
from gateway.batches.runner import OtherRequest, SeenOthers, surroundings_of
from gateway.batches.window import LineWindow, WhatElse
from tests.unit.gateway.batches.serving import serving, until


def idle(window: LineWindow, now_s: float, num_engines: int = 1) -> None:
    window.look(now_s, WhatElse(num_engines))


def beside(window: LineWindow, now_s: float, *, asked_s: float | None = None, wait: bool = False) -> None:
    asked_s = now_s if asked_s is None else asked_s
    window.look(now_s, WhatElse(1, others_run=True, others_wait=wait, asked_s=asked_s))


def room(window: LineWindow, now_s: float = 1e9) -> int:
    return next(number for number in range(10_000) if not window.has_room(number, now_s))


def end(window: LineWindow, times: int = 1) -> None:
    for _ in range(times):
        window.ended(0.0, 0.0)


def known(window: LineWindow, now_s: float) -> None:
    """Others' first tokens took 10 to 20 ms without lines."""
    for number in range(50):
        window.first_token(0.010 + 0.0002 * number, now_s, is_alone=True)


def test_a_window_grows_while_nobody_else_asks_up_to_so_many_for_each_engine() -> None:
    window = LineWindow(8)
    idle(window, 0.0)
    assert room(window) == 1
    end(window, 100)
    assert window.size == 8
    # An engine works for another gateway.
    window.look(0.5, WhatElse(1, others_run=True))
    assert room(window) == 2
    idle(window, 1.0, num_engines=2)
    end(window, 100)
    assert window.size == 16
    idle(window, 2.0, num_engines=0)
    assert room(window) == 0


def test_a_window_is_halved_while_others_wait_and_grows_slowly_afterwards() -> None:
    window = LineWindow(32)
    idle(window, 0.0)
    end(window, 100)
    window.look(1.0, WhatElse(1, others_run=True, others_wait=True))
    # Beside others there is a quarter, and half of that where they wait.
    assert window.size == 4
    window.look(1.1, WhatElse(1, others_run=True, others_wait=True))
    assert window.size == 4
    for now_s in range(2, 12):
        window.look(now_s, WhatElse(1, others_run=True, others_wait=True))
        end(window)
    # One at a time goes on: a batch is not starved for ever.
    assert window.size == 1
    idle(window, 20.0)
    end(window, 2)
    assert window.size < 3


def test_a_window_does_not_grow_into_a_queue() -> None:
    window = LineWindow(32)
    window.look(0.0, WhatElse(1, queued=True))
    end(window, 100)
    assert window.size == 1


def test_one_line_is_beside_others_until_their_first_tokens_are_as_early_as_alone() -> None:
    window = LineWindow(32)
    idle(window, 0.0)
    end(window, 100)
    known(window, 0.0)
    beside(window, 1.0)
    assert room(window) == 1, "however many there were before"
    end(window)
    assert room(window) == 1, "lines say nothing of others"
    for _ in range(100):
        window.first_token(0.015, 1.0, is_alone=False)
    beside(window, 1.1)
    assert room(window) == 8, "a quarter of all"
    for _ in range(4):
        window.first_token(0.025, 1.1, is_alone=False)
    assert room(window) < 4
    # Nobody asked for half a minute.
    beside(window, 31.0, asked_s=1.1)
    assert room(window) < 4
    beside(window, 32.0, asked_s=1.1)
    assert room(window) == 8
    idle(window, 33.0)
    assert room(window) == 32


def test_no_line_begins_while_a_first_token_of_others_is_on_its_way_but_for_one_a_second() -> None:
    window = LineWindow(32)
    known(window, 0.0)
    for _ in range(100):
        window.first_token(0.015, 1.0, is_alone=False)
    window.began(1.0)
    window.look(1.0, WhatElse(1, others_run=True, others_begin=True, asked_s=1.0))
    assert room(window, 1.0) == room(window, 1.99) == 0
    assert room(window, 2.01) == 1
    beside(window, 1.1)
    assert room(window, 1.1) == 8


def test_a_line_follows_later_where_one_after_another_makes_others_late() -> None:
    window = LineWindow(32)
    known(window, 0.0)
    beside(window, 0.0)
    window.first_token(0.025, 0.0, is_alone=False)
    assert 0.5 < window.beside < 1.0
    window.ended(10.0, 0.3)
    rests_s = 0.3 * (1 / window.beside - 1)
    assert room(window, 10.0) == room(window, 10.0 + 0.9 * rests_s) == 0
    assert room(window, 10.0 + 1.1 * rests_s) == 1
    for _ in range(100):
        window.first_token(0.025, 10.0, is_alone=False)
    window.ended(20.0, 0.3)
    assert room(window, 20.25) == 0
    assert room(window, 20.35) == 1, "half of the time in any case"
    window.look(60.0, WhatElse(1))
    window.ended(60.0, 0.3)
    assert room(window, 60.0) >= 1, "nobody else asks"


def test_first_tokens_between_lines_that_rest_are_judged_as_those_beside_lines() -> None:
    """Those that meet no line are the early ones: if they were what tokens take without lines, all others
    would be late.
    """
    window = LineWindow(32)
    known(window, 0.0)
    beside(window, 0.0)
    late_s = window._firsts.late_s
    window.first_token(0.025, 0.0, is_alone=False)
    window.ended(10.0, 1.0)
    before = window.beside
    for _ in range(5):
        window.first_token(0.001, 10.1, is_alone=True)
    assert window.beside > before
    assert window._firsts.late_s == late_s
    for _ in range(200):
        window.first_token(0.001, 60.0, is_alone=True)
    assert window._firsts.late_s == 0.001


@pytest.mark.parametrize("late", [0.02, 0.1, 0.5])
def test_lines_become_so_many_that_few_more_tokens_are_late_than_alone(late: float) -> None:
    """`late`: the share of first tokens that each line makes late, beside the tenth that always is."""
    draw, window = random.Random(3), LineWindow(128)
    known(window, 0.0)
    num_late = sizes = 0.0
    for number in range(4000):
        now_s = number / 10
        known(window, now_s)
        beside(window, now_s)
        size = room(window)
        is_late = draw.random() < min(1.0, 0.1 + late * (size - 1))
        window.first_token(0.05 if is_late else 0.012, now_s, is_alone=False)
        if number >= 1000:
            num_late += is_late
            sizes += size
    assert 0.09 < num_late / 3000 < 0.2
    assert sizes / 3000 == pytest.approx(1 + 0.05 / late, rel=0.35)


def test_lines_pause_for_a_moment_where_nothing_is_known_of_tokens_without_them() -> None:
    window = LineWindow(32)
    beside(window, 100.0)
    assert room(window) == 0
    beside(window, 100.5)
    assert room(window) == 0
    beside(window, 101.1)
    assert room(window) == 1, "a second at most"
    beside(window, 110.0)
    assert room(window) == 1, "not before ten more"
    beside(window, 111.5)
    assert room(window) == 0
    window.first_token(0.02, 111.6, is_alone=True)
    beside(window, 111.6)
    assert room(window) == 1, "that was all that one waited for"
    beside(window, 121.0)
    assert room(window) == 1


class _Told(LineWindow):
    def __init__(self) -> None:
        super().__init__(8)
        self.firsts: list[tuple[float, bool]] = []

    def first_token(self, took_s: float, now_s: float, *, is_alone: bool) -> None:
        self.firsts.append((took_s, is_alone))


def test_a_first_token_is_alone_if_no_line_was_under_way_from_its_request_on() -> None:
    window = _Told()
    seen = SeenOthers(window)
    waits, has_one = OtherRequest("a", 10.2, None, 0.5), OtherRequest("a", 10.2, 10.3, 0.5)
    seen.look([], 10.0, num_lines=0)
    seen.look([waits], 10.25, num_lines=0)
    assert not window.firsts
    seen.look([has_one], 10.31, num_lines=0)
    seen.look([has_one], 10.4, num_lines=1)
    assert window.firsts == [(pytest.approx(0.1), True)], "each is told once"
    # A line ended between a request and its token.
    seen.look([OtherRequest("b", 11.0, None, None)], 11.1, num_lines=1)
    seen.look([OtherRequest("b", 11.0, 11.3, None)], 11.3, num_lines=0)
    assert window.firsts[1:] == [(pytest.approx(0.3), False)]


def test_who_asks_is_seen_while_the_request_is_prepared_but_not_while_a_model_is_loaded() -> None:
    identity, line = SimpleNamespace(in_batch=False), SimpleNamespace(in_batch=True)
    now_s = time.monotonic()
    arriving = {
        "chat": SimpleNamespace(identity=identity, received_s=now_s),
        "waits for a model": SimpleNamespace(identity=identity, received_s=now_s - 60.0),
        "line": SimpleNamespace(identity=line, received_s=now_s),
    }
    books = SimpleNamespace(running=())
    pipeline = SimpleNamespace(draining=False, books=books, arriving=arriving)
    assert [each.key for each in surroundings_of(pipeline).others()] == ["chat"]


def test_gateways_hear_of_each_other_and_not_of_themselves(tmp_path: Path) -> None:
    one, other = AskedMark(tmp_path / "asked"), AskedMark(tmp_path / "asked")
    assert not one.exchange(is_asked=False)
    assert not one.exchange(is_asked=True)
    assert not one.exchange(is_asked=True)
    assert not other.exchange(is_asked=False), "of what was before it nobody knows how long ago"
    assert not one.exchange(is_asked=True)
    assert other.exchange(is_asked=False)
    assert not other.exchange(is_asked=False), "once"
    assert not other.exchange(is_asked=True)
    assert one.exchange(is_asked=False)


async def test_lines_give_way_to_who_asks_another_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path) as one, serving(tmp_path) as other:
        runners: list[Any] = [stack.gateway._batches._runner for stack in (one, other)]  # type: ignore[union-attr]

        async def both_look() -> bool:
            return all(runner._mark._seen_ns is not None for runner in runners)

        await until(both_look)
        await other.chat()

        async def heard() -> bool:
            return runners[0]._heard_s is not None

        await until(heard)
        assert runners[1]._heard_s is None
