"""`last` shows a request whole, whoever sent it: each service sends its spans by itself, a moment later."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from observability.analysis import terminal, waterfall, why
from observability.analysis.decode import StoredSpan
from observability.analysis.store import SpanStore
from observability.emit import names
from tests.unit.observability import jaeger_stand_in
from tests.unit.observability.planted import message, request_trace, write

S = 1_000_000_000
# Longer than what is still on its way needs, and than anybody waits.
LONG_S = 20.0


@dataclass
class Clock:
    """Time passes in pauses alone, before each of which something may happen."""

    slept_s: float = 0.0
    pauses: list[Callable[[], None]] = field(default_factory=list)
    began_ns: int = field(default_factory=time.time_ns)

    def monotonic(self) -> float:
        return self.slept_s

    def time_ns(self) -> int:
        return self.began_ns + int(self.slept_s * S)

    def sleep(self, seconds: float) -> None:
        if self.pauses:
            self.pauses.pop(0)()
        self.slept_s += seconds


@dataclass
class Kept:
    """Where spans are kept, by the option that names it, and what puts them there."""

    option: str
    address: str
    add: Callable[[list[StoredSpan]], None]

    def shows(self, command: Callable[[list[str]], int], *options: str) -> None:
        assert command([self.option, self.address, *options, "last"]) == 0


@pytest.fixture(params=["--store", "--jaeger"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "--store":
        path = tmp_path / "traces.sqlite"
        store = SpanStore(path, max_spans=1000, max_bytes=1 << 30)
        yield Kept("--store", str(path), lambda spans: write(store, spans))
        store.close()
        return
    messages: list[bytes] = []

    def add(spans: list[StoredSpan]) -> None:
        services = dict.fromkeys(span.service for span in spans)
        messages.extend(message([span for span in spans if span.service == name]) for name in services)

    with jaeger_stand_in.jaeger(lambda: messages) as url:
        yield Kept("--jaeger", url, add)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(terminal, "time", made)
    return made


def halves(
    request_id: str, number: int, clock: Clock, *, ago_s: float
) -> tuple[list[StoredSpan], list[StoredSpan]]:
    """A request answered so long ago: what all but the engine tell of it, and what the engine does."""
    long_ns = max(span.end_ns for span in request_trace(start_ns=0))
    start_ns = clock.began_ns - int(ago_s * S) - long_ns
    spans = request_trace(request_id, number=number, start_ns=start_ns)
    return (
        [span for span in spans if span.service != names.ENGINE],
        [span for span in spans if span.service == names.ENGINE],
    )


@pytest.mark.parametrize("command", [waterfall.main, why.main], ids=["trace", "why"])
@pytest.mark.parametrize("options", [(), ("--after", "r-0")], ids=["nobody", "asked before"])
def test_a_request_that_was_just_answered_is_shown_whole(
    kept: Kept,
    clock: Clock,
    command: Callable[[list[str]], int],
    options: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for half in halves("r-0", 1, clock, ago_s=LONG_S):
        kept.add(half)
    early, late = halves("r-1", 2, clock, ago_s=0.5)
    kept.add(early)
    # Somebody else asks meanwhile, and is not waited for.
    newer, _ = halves("r-2", 3, clock, ago_s=0.0)
    clock.pauses = [lambda: kept.add(newer), lambda: kept.add(late)]
    kept.shows(command, *options)
    shown = capsys.readouterr().out
    assert clock.pauses == []
    assert clock.slept_s < 1.0
    assert "r-1" in shown
    assert "r-2" not in shown
    assert command is not waterfall.main or "engine.prefill" in shown


def test_one_whose_rest_does_not_come_is_shown_as_it_is(
    kept: Kept, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    kept.add(halves("r-1", 1, clock, ago_s=0.0)[0])
    kept.shows(waterfall.main)
    assert "r-1" in capsys.readouterr().out
    assert 1.0 < clock.slept_s < LONG_S


def test_an_old_one_is_not_waited_for(kept: Kept, clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    kept.add(halves("r-1", 1, clock, ago_s=LONG_S)[0])
    kept.shows(waterfall.main)
    assert "r-1" in capsys.readouterr().out
    assert clock.slept_s == 0.0


def test_a_clock_that_is_ahead_does_not_have_anybody_wait_for_long(
    kept: Kept, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.add(halves("r-1", 1, clock, ago_s=0.0)[0])
    monkeypatch.setattr(clock, "began_ns", clock.began_ns - 3600 * S)
    kept.shows(waterfall.main)
    assert 1.0 < clock.slept_s < LONG_S
