"""Which models are in memory: who waits is served, who is idle leaves, and nothing is beyond its bounds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.supervisor.residence import PATIENCE_S, Resident, next_moves


def moves(*residents: Resident, budget: int = 0, most: int = 0, now: float = 100.0) -> list[tuple[str, str]]:
    found = next_moves(residents, budget_bytes=budget, max_loaded=most, now=now)
    return [(move.what, move.resident.key) for move in found]


def loaded(key: str, used_s: float, num_bytes: int = 10, **more: object) -> Resident:
    return Resident(key=key, num_bytes=num_bytes, state="loaded", used_s=used_s, **more)  # type: ignore[arg-type]


def asked_for(key: str, since_s: float = 99.0, num_bytes: int = 10) -> Resident:
    return Resident(key=key, num_bytes=num_bytes, num_waiting=1, waiting_since_s=since_s)


def test_who_is_asked_for_is_loaded_where_there_is_room() -> None:
    assert moves(asked_for("a"), Resident(key="b", num_bytes=10), budget=10) == [("load", "a")]


def test_the_least_recently_used_makes_room() -> None:
    held = [loaded("old", 10.0), loaded("new", 90.0)]
    assert moves(*held, asked_for("a"), budget=25) == [("unload", "old")]
    assert moves(*held, asked_for("a"), most=2) == [("unload", "old")]
    # As many as it takes.
    assert moves(*held, asked_for("a", num_bytes=20), budget=25) == [("unload", "old"), ("unload", "new")]


def test_nobody_is_evicted_for_what_leaves_already() -> None:
    held = [Resident(key="leaving", num_bytes=10, state="unloading"), loaded("idle", 10.0)]
    assert moves(*held, asked_for("a"), budget=20) == []


def test_nobody_is_evicted_where_it_would_not_be_enough() -> None:
    busy = loaded("busy", 100.0, num_bytes=20, num_open=1, loaded_s=99.0)
    assert moves(loaded("idle", 10.0), busy, asked_for("a", num_bytes=25), budget=30) == []


def test_what_is_in_use_makes_room_after_a_while() -> None:
    busy = loaded("busy", 100.0, num_open=1, loaded_s=50.0)
    assert moves(busy, asked_for("a", since_s=99.0), budget=15) == []
    assert moves(busy, asked_for("a", since_s=100.0 - PATIENCE_S), budget=15) == [("unload", "busy")]


def test_what_is_idle_for_long_leaves() -> None:
    assert moves(loaded("a", 40.0, idle_unload_s=60.0), loaded("b", 41.0, idle_unload_s=60.0)) == [
        ("unload", "a")
    ]
    assert moves(loaded("never", 0.0)) == []
    assert moves(loaded("asked", 0.0, idle_unload_s=1.0, num_open=1)) == []


def test_a_failed_load_is_not_begun_again_at_once() -> None:
    failed = asked_for("a")
    failed.retry_s = 101.0
    assert moves(failed) == []
    assert moves(failed, now=101.0) == [("load", "a")]


def test_use_is_noted_until_the_last_request_has_ended() -> None:
    one = loaded("a", 0.0)
    one.asked(0, 1, now=5.0)
    one.asked(0, 0, now=9.0)
    one.asked(0, 0, now=20.0)
    assert one.used_s == 9.0


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 10), min_size=1, max_size=6),
    asked=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8)), max_size=40),
    most=st.integers(0, 3),
)
def test_everybody_is_served_within_the_bounds(
    sizes: list[int], asked: list[tuple[int, int]], most: int
) -> None:
    """Loads and unloads take a second each; a request is open for some seconds once its model is there."""
    budget = 12
    models = [Resident(key=str(each), num_bytes=size) for each, size in enumerate(sizes)]
    waiting: list[tuple[Resident, int]] = [(models[which % len(models)], long) for which, long in asked]
    running: list[tuple[Resident, float]] = []
    ends: dict[str, float] = {}
    now = 0.0
    while waiting or running:
        assert now < 5000, "somebody waits for ever"
        for model in models:
            if model.key in ends and ends[model.key] <= now:
                del ends[model.key]
                if model.state == "loading":
                    model.state, model.loaded_s, model.used_s = "loaded", now, now
                elif not any(each is model for each, _ in running):
                    model.state = "unloaded"
                else:
                    ends[model.key] = now + 1
        running = [(model, end) for model, end in running if end > now]
        for each in [each for each in waiting if each[0].state == "loaded"]:
            waiting.remove(each)
            running.append((each[0], now + each[1]))
        for model in models:
            num_waiting = sum(each is model for each, _ in waiting)
            model.asked(num_waiting, sum(each is model for each, _ in running), now)
        for move in list(next_moves(models, budget_bytes=budget, max_loaded=most, now=now)):
            move.resident.state = "loading" if move.what == "load" else "unloading"
            ends[move.resident.key] = now + 1
        held = [each for each in models if each.state != "unloaded"]
        assert sum(each.num_bytes for each in held) <= budget
        assert not most or len(held) <= most
        now += 0.5
