"""A disk that is full pauses batches; they go on when there is room, and can end without it."""

from __future__ import annotations

import asyncio
import errno
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from contract.errors import MillraceError, Reason
from gateway.batches import content, job
from gateway.batches.spool import Spool, Written
from gateway.batches.types import LineOutcome
from tests.unit.gateway.batches.serving import (
    call,
    create,
    ended,
    jsonl,
    ledger_rows,
    ok,
    request,
    results,
    serving,
    until,
)
from tests.unit.gateway.rig.deployment import Deployment
from tests.unit.gateway.rig.engine import ScriptedEngine


def batches_of(stack: Deployment) -> Any:
    return stack.gateway._batches


@asynccontextmanager
async def on_a_full_disk(tmp_path: Path, **more: Any) -> AsyncIterator[tuple[Deployment, Callable[[], None]]]:
    """A gateway that keeps more free than any disk has, and what makes room."""
    async with serving(tmp_path, ScriptedEngine(step_s=0.005), **more) as stack:
        parts = batches_of(stack)._runner._parts
        usual = parts.config
        full = type(usual)(directory=usual.directory, lease_s=usual.lease_s, min_free_bytes=1 << 60)
        object.__setattr__(parts, "config", full)
        yield stack, lambda: object.__setattr__(parts, "config", usual)


async def paused(stack: Deployment, batch: dict[str, Any]) -> dict[str, Any]:
    async def look() -> Any:
        now = await ok(stack, "GET", f"batches/{batch['id']}")
        return now if "paused" in (now["status_detail"] or "") else None

    return dict(await until(look))


async def test_full_disk_pauses_the_batch_and_it_goes_on(tmp_path: Path) -> None:
    async with on_a_full_disk(tmp_path) as (stack, make_room):
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(30))))
        now = await paused(stack, batch)
        assert "paused: the disk of gateway.batches.directory is full" in now["status_detail"]
        assert now["status"] == "in_progress"
        make_room()
        batch = await ended(stack, batch)
        assert (batch["status"], batch["status_detail"]) == ("completed", None)
        found = await results(stack, batch["output_file_id"])
    assert sorted(int(each["custom_id"]) for each in found) == list(range(30))
    assert len(ledger_rows(tmp_path)) == 30


async def test_what_pauses_a_batch_is_told_in_words_that_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though what is free changes all the time."""
    free = iter(range(10**6, 0, -1))
    monkeypatch.setattr(content, "free_bytes", lambda folder: next(free))
    monkeypatch.setattr(job, "_RETRY_S", 0.01)
    async with on_a_full_disk(tmp_path) as (stack, make_room):
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(3))), completion_window="2h")
        told = (await paused(stack, batch))["status_detail"]
        before = next(free)

        async def looked_again() -> bool:
            return next(free) < before - 10

        await until(looked_again)
        assert (await paused(stack, batch))["status_detail"] == told
        make_room()
        await ended(stack, batch)
    assert f"gateway.batches.min_free_bytes = {1 << 60}" in told
    expires = datetime.fromtimestamp(batch["expires_at"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    assert f"its completion_window of 2h ends at {expires}: what is not answered then expires" in told
    assert len([each for each in caplog.messages if "pauses" in each]) == 1


@pytest.mark.parametrize("sealed", [False, True])
async def test_a_batch_that_a_full_disk_pauses_can_be_cancelled(tmp_path: Path, sealed: bool) -> None:
    key = {"key": "0123456789abcdef" * 4} if sealed else {}
    async with on_a_full_disk(tmp_path, max_in_flight=1, **key) as (stack, _):
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(9))))
        await paused(stack, batch)
        cancelled = await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        assert cancelled["status"] == "cancelling"
        batch = await ended(stack, batch)
        assert (batch["status"], batch["status_detail"]) == ("cancelled", None)
        answered = await results(stack, batch["output_file_id"])
        rest = await results(stack, batch["error_file_id"])
        gone = await call(stack, "DELETE", f"files/{batch['input_file_id']}")
        assert gone.status_code == 200, gone.text
    assert sorted(each["custom_id"] for each in answered + rest) == [str(each) for each in range(9)]
    assert len(answered) == batch["request_counts"]["completed"] == len(ledger_rows(tmp_path)) > 0


async def test_a_batch_that_a_full_disk_pauses_expires(tmp_path: Path) -> None:
    async with on_a_full_disk(tmp_path, max_in_flight=1) as (stack, _):
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(9))))
        await paused(stack, batch)
        store = batches_of(stack).store
        now = store._clock
        store._clock = lambda: now() + 25 * 3600
        batch = await ended(stack, batch)
        store._clock = now
        assert batch["status"] == "expired"
        answered = await results(stack, batch["output_file_id"])
        rest = await results(stack, batch["error_file_id"])
    assert len(answered) + len(rest) == 9
    assert {each["error"]["code"] for each in rest} == {"batch_expired"}


async def test_an_end_for_whose_lines_there_is_no_room_keeps_the_answers_and_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = Spool.commit

    def committed(spool: Spool, lines: Sequence[Written]) -> None:
        if any(line.outcome is LineOutcome.CANCELLED for line in lines):
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(spool, lines)

    monkeypatch.setattr(Spool, "commit", committed)
    async with on_a_full_disk(tmp_path, max_in_flight=1) as (stack, _):
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(9))))
        await paused(stack, batch)
        await ok(stack, "POST", f"batches/{batch['id']}/cancel")
        batch = await ended(stack, batch)
        assert (batch["status"], batch["error_file_id"]) == ("cancelled", None)
        answered = await results(stack, batch["output_file_id"])
    (problem,) = batch["errors"]["data"]
    assert (problem["code"], len(answered)) == ("disk_full", len(ledger_rows(tmp_path)))
    assert problem["message"].startswith(f"{9 - len(answered)} lines were cancelled without a line")


async def test_a_database_that_cannot_be_written_pauses_the_batch_longer_than_its_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = ScriptedEngine(step_s=0.002)
    async with serving(tmp_path, engine, max_in_flight=4) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(400))))

        async def some() -> bool:
            return len(engine.submissions) >= 20

        await until(some)
        store, (running,) = batches_of(stack).store, batches_of(stack)._runner._jobs.values()

        def refused(lease: Any) -> None:
            raise MillraceError(Reason.STORE_UNAVAILABLE, "the database is away", retry_after_s=0.01)

        with monkeypatch.context() as patched:
            patched.setattr(store, "save", refused)
            await paused(stack, batch)
            num, ends_ms = len(engine.submissions), store.now_ms() + 3 * round(store.config.lease_s * 1000)

            async def is_over() -> bool:
                assert "the database is away" in (await paused(stack, batch))["status_detail"]
                return bool(store.now_ms() > ends_ms)

            await until(is_over)
            assert len(engine.submissions) <= num + 4, "what is computed waits in memory"
        batch = await ended(stack, batch)
        found = await results(stack, batch["output_file_id"])
    assert not running.is_lost, "the gateway took it from itself when its lease had run out"
    assert (batch["status"], batch["status_detail"]) == ("completed", None)
    assert sorted(int(each["custom_id"]) for each in found) == list(range(400))
    assert len(ledger_rows(tmp_path)) == 400


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m,mode=0700", "millrace", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


async def keep_full(disk: Path) -> None:
    """Takes the last byte, and what others give back, until it is cancelled; now and then there is a little
    room for a moment.
    """
    with (disk / "ballast").open("ab", buffering=0) as ballast:
        while True:
            for _ in range(65):
                for size in (1 << 16, 1 << 12, 1):
                    with suppress(OSError):
                        while ballast.write(bytes(size)) == size:
                            pass
                await asyncio.sleep(0.02)
            ballast.truncate(ballast.tell() - (1 << 15))
            await asyncio.sleep(0.02)


async def test_a_disk_without_a_byte_pauses_the_batch_as_long_as_it_is_full_and_no_longer(
    small_disk: Path,
) -> None:
    """Its database is on the same disk: leases cannot be renewed there, or now and then."""
    async with serving(small_disk, ScriptedEngine(step_s=0.005), max_in_flight=4) as stack:
        batch = await create(stack, jsonl(*(request(str(each)) for each in range(400))))

        async def some() -> bool:
            counts = (await ok(stack, "GET", f"batches/{batch['id']}"))["request_counts"]
            return bool(counts["completed"] >= 20)

        await until(some)
        filling = asyncio.create_task(keep_full(small_disk))
        await paused(stack, batch)
        store, told = batches_of(stack).store, set[tuple[str, str]]()
        ends_ms = store.now_ms() + 12 * round(store.config.lease_s * 1000)

        async def is_over() -> bool:
            now = await ok(stack, "GET", f"batches/{batch['id']}")
            told.add((now["status"], (now["status_detail"] or "").partition(":")[0]))
            return bool(store.now_ms() > ends_ms)

        await until(is_over)
        filling.cancel()
        (small_disk / "ballast").unlink()
        assert told == {("in_progress", "paused")}
        batch = await ended(stack, batch)
        assert (batch["status"], batch["status_detail"]) == ("completed", None)
        found = await results(stack, batch["output_file_id"])
    assert sorted(int(each["custom_id"]) for each in found) == list(range(400))
    assert len(ledger_rows(small_disk)) == 400
