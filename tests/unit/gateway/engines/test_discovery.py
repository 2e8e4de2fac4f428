"""Where engines are found goes on being looked up, whatever somebody wrote there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gateway.engines.fleet import follow, lookup_of


async def test_file_that_is_not_utf_8_is_followed_on(tmp_path: Path) -> None:
    listing = tmp_path / "engines"
    listing.write_bytes(b"\xef\xbb\xbfone:1 # with a byte order mark\n")
    found: asyncio.Queue[list[str]] = asyncio.Queue()

    async def apply(targets: Sequence[str]) -> None:
        found.put_nowait(list(targets))

    following = asyncio.create_task(follow(lookup_of(f"file:{listing}", ()), apply, 0.005))
    assert await found.get() == ["one:1"]
    listing.write_bytes(b"two:2 # caf\xe9\n")
    assert await asyncio.wait_for(found.get(), 10) == ["two:2"]
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following


@pytest.mark.parametrize(
    "content", [b"", b"# none\n", b"two:2\nthree", b"one:1, two:2\n", "two:2\n".encode("utf-16"), b"two:x\n"]
)
async def test_file_that_cannot_be_meant_takes_no_engine_away(tmp_path: Path, content: bytes) -> None:
    listing = tmp_path / "engines"
    lookup = lookup_of(f"file:{listing}", ())
    listing.write_bytes(b"one:1\n[::1]:50071\none:1\n")
    assert await lookup() == ["one:1", "[::1]:50071"]
    listing.write_bytes(content)
    with pytest.raises(ValueError, match=r"engines"):
        await lookup()


async def test_file_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    listing = tmp_path / "engines"
    listing.write_text("one:1\ntwo:2000")
    # What was read is looked at again after a moment.
    lookup = asyncio.ensure_future(lookup_of(f"file:{listing}", ())())
    while not lookup.done():
        # Written over in place: it is never empty.
        with listing.open("r+") as file:
            file.write(f"one:1\ntwo:2{time.monotonic_ns() % 1000:03}")
        await asyncio.sleep(0.005)
    with pytest.raises(ValueError, match="being written"):
        await lookup


async def test_lookup_that_fails_changes_nothing() -> None:
    answers: list[list[str] | Exception] = [
        ["one:1"],
        OSError("away"),
        ValueError("label too long"),
        ["two:2"],
    ]
    applied: list[list[str]] = []
    all_asked = asyncio.Event()

    async def lookup() -> list[str]:
        answer = answers.pop(0) if answers else ["two:2"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def apply(targets: Sequence[str]) -> None:
        applied.append(list(targets))
        if not answers:
            all_asked.set()

    following = asyncio.create_task(follow(lookup, apply, 0.001))
    await asyncio.wait_for(all_asked.wait(), 10)
    following.cancel()
    assert applied == [["one:1"], ["two:2"]]
