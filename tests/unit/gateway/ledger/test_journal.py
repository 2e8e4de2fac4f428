"""What a killed process leaves is in the ledger: what it had told, and what the database did not have yet."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from gateway.ledger import journal
from gateway.ledger.journal import Journal, left_behind
from gateway.ledger.tables import open_ledger
from gateway.ledger.usage import month_sums
from gateway.limits.reservation import Holds
from gateway.pipeline.ports import FinishedRequest, Progress
from tests.unit.gateway.ledger.test_writer import finished, rows, writer


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/ledger.sqlite"


def begun(request_id: str) -> FinishedRequest:
    return finished(
        request_id,
        outcome="interrupted",
        prompt_tokens=0,
        cached_prompt_tokens=0,
        completion_tokens=0,
        candidate_tokens=0,
    )


def progress(completion_tokens: int, **fields: Any) -> Progress:
    values = {"prompt_tokens": 100, "cached_prompt_tokens": 60, "candidate_tokens": 0, **fields}
    return Progress(completion_tokens=completion_tokens, **values)


def _serve_and_die(url: str) -> None:
    ledger = writer(url, flush_interval_s=600, flush_entries=1000)
    entries = [ledger.begin(begun(f"r{number}"), Holds()) for number in range(3)]
    for number in range(1, 8):
        entries[1].told(progress(number))
    entries[2].told(progress(10, candidate_tokens=30, outcome="stop"))
    last = begun("r3")
    ledger.begin(last, Holds()).told(progress(1))
    ledger.record(finished("r3", entry_id=last.entry_id, completion_tokens=2))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_told_is_in_the_ledger_of_the_next(url: str) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_serve_and_die, args=(url,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not rows(open_ledger(url))
    for _ in range(2):
        writer(url).close()
        names = ("request_id", "outcome", "prompt_tokens", "completion_tokens", "candidate_tokens", "ttft_ms")
        assert [tuple(row[name] for name in names) for row in rows(open_ledger(url))] == [
            ("r0", "interrupted", 0, 0, 0, 100.0),
            ("r1", "interrupted", 100, 7, 0, 100.0),
            ("r2", "stop", 100, 10, 30, 100.0),
            ("r3", "stop", 100, 2, 7, 100.0),
        ]
    assert not list(Path(f"{url.removeprefix('sqlite:///')}-open").iterdir())


def test_rows_of_a_month_are_what_its_meters_begin_with(url: str) -> None:
    ledger = writer(url)
    for fields in (
        {},
        {"outcome": "interrupted", "tenant": "other"},
        # Of the month before, in which it began.
        {"duration_ms": 40 * 24 * 3600 * 1000.0},
        {"ended_unix_ms": 1_787_000_000_000},
    ):
        ledger.record(finished("r", **fields))
    ledger.close()
    engine = open_ledger(url)
    assert month_sums(engine, "2026-09") == {
        **{f"tenant:{tenant}:tokens:2026-09": 117 for tenant in ("acme", "other")},
        **{f"tenant:{tenant}:cost:2026-09": 80_000 for tenant in ("acme", "other")},
        "key:k:tokens:2026-09": 234,
        "key:k:cost:2026-09": 160_000,
    }


def test_a_journal_whose_owner_lives_is_left_to_it(url: str) -> None:
    ledger = writer(url)
    ledger.begin(begun("r0"), Holds())
    writer(url).close()
    assert not rows(open_ledger(url))
    ledger.close()


def test_a_database_that_is_away_to_the_end_gets_the_rows_from_the_next_process(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    request = begun("r0")
    kept.begin(request, Holds())
    kept.end(finished("r0", entry_id=request.entry_id))
    kept.close()
    ((_, requests),) = left_behind(tmp_path)
    assert [(each.request_id, each.completion_tokens) for each in (kept.request for kept in requests)] == [
        ("r0", 10)
    ]


def test_a_long_life_keeps_what_is_open_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 4000)
    kept = Journal(tmp_path)
    first = kept.begin(begun("first"), Holds())
    for number in range(500):
        request = begun(f"r{number}")
        kept.begin(request, Holds()).settled()
        kept.end(finished(request.request_id, entry_id=request.entry_id))
        if number != 450:
            kept.forget([request.entry_id])
        first.told(progress(number))
    (path,) = tmp_path.glob("*.open")
    assert path.stat().st_size < 6000
    found = {each.request.request_id: each.request for each in journal._read(path)}
    assert found["first"].completion_tokens == 499
    assert found["r450"].outcome == "stop"
    kept.close()


def test_a_record_that_was_cut_off_ends_the_file(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    for number in range(3):
        kept.begin(begun(f"r{number}"), Holds())
    (path,) = tmp_path.glob("*.open")
    os.truncate(path, path.stat().st_size - 5)
    assert [each.request.request_id for each in journal._read(path)] == ["r0", "r1"]
    kept.close()


def test_a_full_disk_stops_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    kept = Journal(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        lost = kept.begin(begun("lost"), Holds())
        lost.told(progress(1))
    kept.begin(begun("kept"), Holds()).told(progress(2))
    (path,) = tmp_path.glob("*.open")
    assert [(each.request.request_id, each.request.completion_tokens) for each in journal._read(path)] == [
        ("kept", 2)
    ]
    kept.close()
