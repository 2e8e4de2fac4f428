"""Results outlive whoever writes them: what a record says stays, everything behind it is cut."""

from __future__ import annotations

import os
import random
import resource
from pathlib import Path

import pytest

from gateway.batches.spool import _SIZE, Spool, SpoolBusy, Written
from gateway.batches.types import LineOutcome


def written(
    position: int, text: bytes, *, file: int = 0, outcome: LineOutcome = LineOutcome.SUCCEEDED
) -> Written:
    return Written(position, outcome, file, text + b"\n")


def test_results_are_there_for_whoever_goes_on(tmp_path: Path) -> None:
    with Spool(tmp_path, 5) as spool:
        spool.commit([written(3, b"three"), written(0, b"zero", file=1, outcome=LineOutcome.ERRORED)])
        spool.commit([written(4, b"four")])
    with Spool(tmp_path, 5) as spool:
        assert [spool.is_done(each) for each in range(5)] == [True, False, False, True, True]
        assert spool.counts == [2, 1, 0, 0]
        # A result that is there already is not written again.
        spool.commit([written(3, b"another three"), written(1, b"one")])
    assert (tmp_path / "output").read_bytes() == b"three\nfour\none\n"
    assert (tmp_path / "errors").read_bytes() == b"zero\n"


def test_two_do_not_write_at_a_time(tmp_path: Path) -> None:
    with Spool(tmp_path, 1), pytest.raises(SpoolBusy):
        Spool(tmp_path, 1)
    Spool(tmp_path, 1).close()


@pytest.mark.parametrize("seed", range(20))
def test_wherever_the_writer_was_killed_each_line_is_there_once_or_not_at_all(
    tmp_path: Path, seed: int
) -> None:
    """Files are cut, or have rubbish at their ends, behind what the last whole record says."""
    draw = random.Random(seed)
    lines = [b"%d " % each + b"x" * draw.randrange(50) for each in range(40)]
    with Spool(tmp_path, len(lines)) as spool:
        for start in range(0, len(lines), 5):
            spool.commit([written(each, lines[each], file=each % 2) for each in range(start, start + 5)])
    kept = draw.randrange(len(lines) + 1)
    os.truncate(tmp_path / "progress", kept * _SIZE + draw.randrange(_SIZE) * (kept < len(lines)))
    for name in ("output", "errors"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"half a li"[: draw.randrange(9)])
    with Spool(tmp_path, len(lines)) as spool:
        done = [each for each in range(len(lines)) if spool.is_done(each)]
        assert done == list(range(kept))
        spool.commit([written(each, lines[each], file=each % 2) for each in range(kept, len(lines))])
    found = [
        *(tmp_path / "output").read_bytes().split(b"\n"),
        *(tmp_path / "errors").read_bytes().split(b"\n"),
    ]
    assert sorted(each for each in found if each) == sorted(lines)


def test_a_record_with_a_wrong_sum_and_what_follows_it_count_for_nothing(tmp_path: Path) -> None:
    with Spool(tmp_path, 3) as spool:
        spool.commit([written(0, b"a"), written(1, b"b"), written(2, b"c")])
    data = bytearray((tmp_path / "progress").read_bytes())
    data[_SIZE + 1] ^= 1
    (tmp_path / "progress").write_bytes(data)
    with Spool(tmp_path, 3) as spool:
        assert [spool.is_done(each) for each in range(3)] == [True, False, False]
    assert (tmp_path / "output").read_bytes() == b"a\n"


def test_what_does_not_fit_leaves_nothing_behind_and_can_be_written_later(tmp_path: Path) -> None:
    """A file may not grow beyond a limit, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Spool(tmp_path, 2) as spool:
        spool.commit([written(0, b"a" * 100)])
        import signal

        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (150, hard))
        try:
            with pytest.raises(OSError):
                spool.commit([written(1, b"b" * 100)])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)
        assert (tmp_path / "output").read_bytes() == b"a" * 100 + b"\n"
        assert not spool.is_done(1)
        spool.commit([written(1, b"b" * 100)])
    assert (tmp_path / "output").read_bytes() == b"a" * 100 + b"\n" + b"b" * 100 + b"\n"
