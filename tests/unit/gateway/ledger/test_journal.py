"""What a killed process leaves is in the ledger: what it had told, and what the database did not have yet."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from gateway.config import LedgerConfig
from gateway.ledger import journal
from gateway.ledger.journal import Journal, left_behind
from gateway.ledger.tables import open_ledger
from gateway.ledger.usage import month_sums
from gateway.ledger.writer import LedgerWriter
from gateway.limits.limiter import Charges
from gateway.pipeline.ports import FinishedRequest, Progress
from observability.analysis.scrape import parse
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.names import Metric
from runtime.errors import ConfigError
from tests.unit.gateway.ledger.test_writer import PRICES, finished, rows, writer


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


def died(target: Callable[[str], None], argument: str) -> None:
    """Runs it in a process that kills itself."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=(argument,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def take_in(url: str) -> Metrics:
    """What a gateway does when it starts, and now and then; the metrics that tell of it."""
    metrics = Metrics()
    ledger = LedgerWriter(open_ledger(url), PRICES, LedgerConfig(url=url), metrics)
    for left in ledger.recover():
        left.remove()
    ledger.close()
    return metrics


def counted(metrics: Metrics, metric: Metric) -> float:
    """The sum over its labels."""
    reading = parse(metrics.expose()[0].decode(), 0.0)
    return reading.value(metric)


def said(folder: Path) -> dict[str, tuple[str, int]]:
    """Outcome and completion tokens of what the files of this folder tell, whoever holds them."""
    found = [
        each.request for path in folder.glob("*.open") for each in journal._read(path.read_bytes(), 0)[0]
    ]
    return {each.request_id: (each.outcome, each.completion_tokens) for each in found}


def _serve_and_die(url: str) -> None:
    ledger = writer(url, flush_interval_s=600, flush_entries=1000)
    entries = [ledger.begin(begun(f"r{number}"), Charges()) for number in range(3)]
    for number in range(1, 8):
        entries[1].record(progress(number))
    entries[2].record(progress(10, candidate_tokens=30, outcome="stop"))
    last = begun("r3")
    ledger.begin(last, Charges()).record(progress(1))
    ledger.record(finished("r3", entry_id=last.entry_id, completion_tokens=2))
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_killed_process_has_told_is_in_the_ledger_of_the_next(url: str) -> None:
    died(_serve_and_die, url)
    assert not rows(open_ledger(url))
    for _ in range(2):
        take_in(url)
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
    ledger.begin(begun("r0"), Charges())
    take_in(url)
    assert not rows(open_ledger(url))
    ledger.close()


def test_a_database_that_is_away_to_the_end_gets_the_rows_from_the_next_process(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    request = begun("r0")
    kept.begin(request, Charges())
    kept.end(finished("r0", entry_id=request.entry_id))
    kept.close()
    (left,) = left_behind(tmp_path)
    assert [(each.request.request_id, each.request.completion_tokens) for each in left.kept] == [("r0", 10)]
    left.release()


def test_a_long_life_keeps_what_is_open_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "_COMPACT_BYTES", 4000)
    monkeypatch.setattr(journal, "_ROOM_BYTES", 4000)
    kept = Journal(tmp_path)
    first = kept.begin(begun("first"), Charges())
    for number in range(500):
        request = begun(f"r{number}")
        kept.begin(request, Charges()).settled()
        kept.end(finished(request.request_id, entry_id=request.entry_id))
        if number != 450:
            kept.forget([request.entry_id])
        first.record(progress(number))
    (path,) = tmp_path.glob("*.open")
    assert path.stat().st_size < 6000
    found = said(tmp_path)
    assert found["first"] == ("interrupted", 499)
    assert found["r450"] == ("stop", 10)
    kept.close()


def test_a_record_that_was_cut_off_ends_the_file(tmp_path: Path) -> None:
    kept = Journal(tmp_path)
    for number in range(3):
        kept.begin(begun(f"r{number}"), Charges())
    (path,) = tmp_path.glob("*.open")
    os.truncate(path, kept._end - 5)
    assert list(said(tmp_path)) == ["r0", "r1"]
    kept.close()


class FullDisk:
    """What is written behind `end` does not fit, and no file is made."""

    def __init__(self, patch: pytest.MonkeyPatch, end: int) -> None:
        self.end = end
        self._pwrite = os.pwrite
        patch.setattr(os, "pwrite", self.pwrite)
        patch.setattr(os, "posix_fallocate", self.posix_fallocate)

    def pwrite(self, file: int, data: bytes, offset: int) -> int:
        if offset + len(data) > self.end:
            raise OSError(errno.ENOSPC, "no space left")
        return self._pwrite(file, data, offset)

    def posix_fallocate(self, file: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")


def _lose_some(url: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        ledger = writer(url, flush_interval_s=600, flush_entries=1000)
        assert ledger._journal is not None
        known = begun("known")
        entry = ledger.begin(known, Charges())
        FullDisk(patch, ledger._journal._end)
        ledger.begin(begun("lost"), Charges()).record(progress(1))
        ledger.record(finished("lost, too"))
        written = begun("written")
        ledger.begin(written, Charges())
        ledger._journal.forget([written.entry_id])
        # What is there is overwritten, and stays when there is no room for its row.
        entry.record(progress(3, outcome="stop"))
        ledger.record(finished("known", entry_id=known.entry_id, completion_tokens=3))
        os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_full_disk_did_not_take_is_counted_when_its_gateway_is_killed(url: str) -> None:
    died(_lose_some, url)
    metrics = take_in(url)
    assert [(row["request_id"], row["completion_tokens"]) for row in rows(open_ledger(url))] == [("known", 3)]
    assert counted(metrics, names.LEDGER_MISSING) == 2
    assert counted(metrics, names.LEDGER_RECOVERED) == 1
    assert counted(metrics, names.LEDGER_JOURNALS) == 1


def test_there_is_room_for_what_comes_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Journal(tmp_path)
    (path,) = tmp_path.glob("*.open")
    assert path.stat().st_blocks * 512 >= journal._ROOM_BYTES
    FullDisk(monkeypatch, journal._ROOM_BYTES)
    for number in range(1000):
        kept.begin(begun(f"r{number}"), Charges()).record(progress(number))
    assert len(said(tmp_path)) == 1000
    assert not kept._missing


def _leave_one(folder: str) -> None:
    Journal(Path(folder)).begin(begun("first"), Charges()).record(progress(1))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_gateway_that_starts_on_a_full_disk_writes_behind_what_another_left(tmp_path: Path) -> None:
    died(_leave_one, str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, journal._ROOM_BYTES)
        second = Journal(tmp_path)
        second.begin(begun("second"), Charges()).record(progress(2))
        assert said(tmp_path) == {"first": ("interrupted", 1), "second": ("interrupted", 2)}
        # Nobody takes it in while it is used.
        assert not list(left_behind(tmp_path))
    second.make_room()
    (left,) = left_behind(tmp_path)
    assert [each.request.request_id for each in left.kept] == ["first"]
    left.remove()
    assert said(tmp_path) == {"second": ("interrupted", 2)}
    second.close()


def test_a_folder_that_takes_no_files_is_named_at_the_start(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(ConfigError, match=r"gateway\.ledger\.journal: .*read-only"):
        writer(url)


def test_a_journal_that_was_made_anew_is_not_taken_in_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died(_leave_one, str(tmp_path))
    opened = os.open

    def open_late(path: Path, flags: int) -> int:
        file = opened(path, flags)
        # Another gateway takes it in between the look and the lock.
        (path.parent / path.name).unlink()
        return file

    monkeypatch.setattr(os, "open", open_late)
    assert not list(left_behind(tmp_path))


def _recover(url: str, together: Barrier, found: Queue[int]) -> None:
    ledger = writer(url)
    together.wait()
    left = ledger.recover()
    found.put(len(left))
    # Held until all have looked.
    together.wait()
    for each in left:
        each.remove()
    ledger.close()


def test_of_several_gateways_that_live_one_takes_in_what_another_left(url: str) -> None:
    died(_serve_and_die, url)
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_recover, args=(url, together, found)) for _ in range(3)]
    for process in processes:
        process.start()
    assert sorted(found.get() for _ in processes) == [0, 0, 1]
    for process in processes:
        process.join()
    assert len(rows(open_ledger(url))) == 4


def test_what_the_database_does_not_take_stays_in_the_journal(url: str) -> None:
    died(_serve_and_die, url)
    ledger = writer(url)
    with open_ledger(url).begin() as connection:
        connection.execute(text("ALTER TABLE requests RENAME TO away"))
    assert not ledger.recover()
    with open_ledger(url).begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO requests"))
    (left,) = ledger.recover()
    assert len(left.kept) == 4
    left.remove()
    ledger.close()
