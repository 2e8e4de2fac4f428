"""`millrace bench sweep`: which rate it finds, when it stops, what it shows and refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from services.bench import picture
from services.bench.records import RequestRecord, Targets
from services.bench.sweep import RateSearch, SweepPoint, SweepTarget, p99_ms, point_of
from services.bench.sweep_report import Sweep
from services.bench.workload import Arrivals, Lengths, Workload
from services.cli.app import app


def searched(capacity: float, **changes: float) -> tuple[RateSearch, list[float], str]:
    """A search of a server that keeps every rate up to its capacity; the rates and why it ended."""
    settings = {"low": 1.0, "high": 1e4, "precision": 0.1, "max_points": 40, **changes}
    search = RateSearch(**settings)  # type: ignore[arg-type]
    rates: list[float] = []
    while not isinstance(following := search.next_rate(), str):
        rates.append(following)
        search.tell(following, is_kept=following <= capacity)
    return search, rates, following


@given(st.floats(0.05, 9_000), st.floats(0.01, 0.5))
def test_the_capacity_lies_between_what_was_kept_and_what_was_missed(
    capacity: float, precision: float
) -> None:
    search, rates, ended = searched(capacity, precision=precision)
    assert ended == "decided"
    assert search.kept is not None
    assert search.missed is not None
    assert search.kept <= capacity < search.missed <= search.kept * (1 + precision)
    # Doubling, and then bits of the precision.
    assert len(rates) == len(set(rates)) <= 24


def test_a_search_ends_where_it_may_go_no_further() -> None:
    search, rates, ended = searched(1e9, high=10)
    assert (ended, rates, search.missed) == ("highest", [1, 2, 4, 8, 10], None)
    search, rates, ended = searched(5, max_points=3)
    assert (ended, rates) == ("points", [1, 2, 4])
    search, rates, ended = searched(0.0)
    assert (ended, search.kept) == ("lowest", None)
    assert min(rates) >= 0.02


def workload(num_requests: int, rate: float = 8.0) -> Workload:
    lengths = Lengths.parse("4")
    return Workload(
        num_requests=num_requests, arrivals=Arrivals(rate=rate), input_tokens=lengths, output_tokens=lengths
    )


def answered(ttft_s: float, gap_s: float = 0.01, *, error: str = "", late_s: float = 0.0) -> RequestRecord:
    return RequestRecord(
        index=0,
        tier="",
        prompt_tokens=4,
        status=200,
        error=error,
        start_s=0.0,
        end_s=ttft_s + gap_s,
        late_s=late_s,
        chunk_times_s=[ttft_s, ttft_s + gap_s],
        completion_tokens=2,
    )


def point(
    records: list[RequestRecord], wanted: SweepTarget, targets: Targets | None = None, *, busy: float = 0.1
) -> SweepPoint:
    return point_of(records, workload(len(records)), 2.0, busy, wanted, targets or Targets())


def test_one_of_a_hundred_may_be_late_or_fail() -> None:
    wanted = SweepTarget(ttft_p99_ms=100)
    good, late = answered(0.05), answered(0.2)
    assert point([good] * 99 + [late], wanted).is_kept
    assert point([good] * 98 + [late] * 2, wanted).missed == ["TTFT p99"]
    assert point([good] * 98 + [answered(0.05, error="cut")] * 2, wanted).missed == ["TTFT p99"]


def test_gaps_and_goodput_are_kept_or_missed_on_their_own() -> None:
    slow = [answered(0.05)] * 98 + [answered(0.05, 0.5)] * 2
    assert point(slow, SweepTarget(gap_p99_ms=100)).missed == ["gap p99"]
    assert point(slow, SweepTarget(gap_p99_ms=600)).is_kept
    targets = Targets(e2e_ms=100)
    assert point(slow, SweepTarget(goodput=0.98), targets).is_kept
    missed = point(slow, SweepTarget(goodput=0.99), targets)
    assert (missed.missed, missed.goodput) == (["goodput"], 0.98)


def test_percentiles_are_those_of_the_ordered_values() -> None:
    assert p99_ms([]) is None
    assert p99_ms([value / 1000 for value in range(100, 0, -1)]) == 99
    assert p99_ms([0.5]) == 500


def test_a_load_generator_that_is_late_or_busy_is_the_limit() -> None:
    wanted = SweepTarget(ttft_p99_ms=100)
    assert not point([answered(0.05)] * 100, wanted).is_clients_limit
    assert point([answered(0.05, late_s=0.2)] * 100, wanted).is_clients_limit
    assert point([answered(0.05)] * 100, wanted, busy=0.95).is_clients_limit


def sweep_of(points: list[SweepPoint], **changes: object) -> Sweep:
    settings: dict[str, object] = {
        "label": "a <b> & c",
        "url": "http://x",
        "model": "m",
        "workload": workload(100),
        "wanted": SweepTarget(ttft_p99_ms=100),
        "targets": Targets(),
        "ended": "decided",
    }
    return Sweep.of(points=points, **{**settings, **changes})  # type: ignore[arg-type]


def at_rates() -> list[SweepPoint]:
    wanted = SweepTarget(ttft_p99_ms=100)
    kept, missed = point([answered(0.05)] * 100, wanted), point([answered(0.4)] * 100, wanted, busy=0.95)
    return [
        msgspec.structs.replace(missed, rate=16.0),
        msgspec.structs.replace(kept, rate=4.0),
        msgspec.structs.replace(kept, rate=8.0),
    ]


def test_a_sweep_says_what_it_found_and_what_to_doubt() -> None:
    found = sweep_of(at_rates())
    assert [each.rate for each in found.points] == [4, 8, 16]
    assert found.found == "8 requests/s (100 output tokens/s) keep the target; 16 do not."
    (warning,) = found.warnings
    assert warning.startswith("At 16 requests/s the load generator was itself the limit")
    assert "Run it on another machine" in warning
    kept = [each for each in at_rates() if each.is_kept]
    assert "At least 8 requests/s" in sweep_of(kept, ended="highest").found
    assert "--points" in sweep_of(kept, ended="points").found
    missed = [each for each in at_rates() if not each.is_kept]
    assert sweep_of(missed, ended="lowest").found.startswith("No rate kept the target")
    assert msgspec.json.decode(msgspec.json.encode(found), type=Sweep) == found


def test_the_picture_is_well_formed_loads_nothing_and_marks_what_was_missed() -> None:
    drawn = ElementTree.fromstring(picture.to_svg(sweep_of(at_rates())))
    space = "{http://www.w3.org/2000/svg}"
    titles = [each.text or "" for each in drawn.iter(f"{space}title")]
    # In the panels of the first token and of gaps.
    assert len(titles) == 6
    assert titles[2] == "16 requests/s: 400 ms, TTFT p99 missed"
    assert next(each.text for each in drawn.iter(f"{space}text")) == "a <b> & c: m"
    assert not [each for each in drawn.iter() if "href" in str(each.attrib)]
    width, height = float(drawn.get("width", "")), float(drawn.get("height", ""))
    for circle in drawn.iter(f"{space}circle"):
        assert 0 <= float(circle.get("cx", "")) <= width
        assert 0 <= float(circle.get("cy", "")) <= height
    assert "target 100" in [each.text for each in drawn.iter(f"{space}text")]


@contextmanager
def one_at_a_time(service_s: float, status: bytes = b"200 OK") -> Iterator[str]:
    """A server that answers one request after another, each in this time; its address."""
    ready, stop = Event(), Event()
    address: list[str] = []

    async def serve() -> None:
        turn = asyncio.Lock()
        event = 'data: {"choices": [{"text": "x"}]}\n\n'
        stream = (event * 2 + "data: [DONE]\n\n").encode()
        head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n" % (status, len(stream))

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                try:
                    asked = await reader.readuntil(b"\r\n\r\n")
                except asyncio.IncompleteReadError:
                    return
                await reader.readexactly(int(asked.lower().split(b"content-length: ")[1].split(b"\r\n")[0]))
                async with turn:
                    await asyncio.sleep(service_s)
                writer.write(head + stream)

        listener = await asyncio.start_server(answer, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.02)
        listener.close()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield address[0]
    finally:
        stop.set()
        thread.join()


def swept(*options: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["bench", "sweep", *options])
    return outcome.exit_code, " ".join(outcome.output.split())


def test_a_server_with_a_capacity_is_measured_until_it_misses(tmp_path: Path) -> None:
    """It serves 50 requests a second at best: however busy this machine is, thrice as many must queue."""
    told, drawn = tmp_path / "sweep.json", tmp_path / "sweep.svg"
    with one_at_a_time(0.02) as url:
        status, said = swept(
            *("--url", url, "--model", "m", "--ttft-p99-ms", "500", "--lowest", "20", "--highest", "150"),
            *("--seconds", "1", "--precision", "1", "--points", "9", "--input-tokens", "4"),
            *("--json", str(told), "--svg", str(drawn)),
        )
    sweep = json.loads(told.read_bytes())
    assert status in {0, 1}, said
    assert sweep["missed_rate"] <= 150
    highest = sweep["points"][-1]
    assert highest["missed"] == ["TTFT p99"]
    # It was given up as soon as it was lost.
    assert highest["summary"]["num_requests"] < highest["num_planned"]
    assert sweep["kept_rate"] is None or sweep["kept_rate"] < sweep["missed_rate"]
    assert "missed: TTFT p99" in said
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")


def test_what_a_server_refuses_at_any_rate_is_no_rate_that_is_missed() -> None:
    with one_at_a_time(0.0, b"404 Not Found") as url:
        status, said = swept(*("--url", url, "--model", "nobody", "--ttft-p99-ms", "500", "--lowest", "200"))
    assert (status, "no request is answered, at whatever rate: data:" in said) == (2, True), said
    assert "missed" not in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "give --ttft-p99-ms, --gap-p99-ms or --goodput"),
        (["--goodput", "0.9"], "give --ttft-target-ms"),
        (["--ttft-p99-ms", "nan"], "--ttft-p99-ms"),
        (["--ttft-p99-ms", "0"], "--ttft-p99-ms"),
        (["--ttft-p99-ms", "5", "--lowest", "9", "--highest", "3"], "--lowest 9 is above --highest 3"),
        (["--ttft-p99-ms", "5", "--requests", "50"], "--requests 50: a 99th percentile needs 100"),
        (["--ttft-p99-ms", "5", "--precision", "0"], "--precision"),
        (["--ttft-p99-ms", "5", "--input-tokens", "none"], "length 'none'"),
        (["--ttft-p99-ms", "5", "--tier", "gold"], "--tier 'gold'"),
        (["--ttft-p99-ms", "5", "--svg", "/proc/nowhere/x.svg"], "--svg /proc/nowhere/x.svg"),
        (["--ttft-p99-ms", "5", "--json", "/proc/nowhere/x"], "--json /proc/nowhere/x"),
        (["--ttft-p99-ms", "5", "--url", "ftp://x"], "expected http://host:port"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(options: list[str], named: str) -> None:
    status, said = swept("--url", "http://127.0.0.1:9", *options)
    assert (status, named in said) == (2, True), said
