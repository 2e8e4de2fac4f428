"""The memory that a batch takes, by its lines: input is indexed, results are written and read again."""

from __future__ import annotations

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from benchmarks.batches.lines import URL, line
from gateway.batches.lines import LineIndex, index_lines, read_line
from gateway.batches.spool import Spool, Written
from gateway.batches.types import LineOutcome

# Results that reach the disk at a time: what 2,500 lines a second are at ten writes a second.
_TOGETHER = 256


def run(num_lines: int) -> dict[str, dict[str, float]]:
    """MiB and seconds after each step, of a tenth of the lines and of all."""
    return {f"{each} lines": _measured(each) for each in (num_lines // 10, num_lines)}


def _measured(num_lines: int) -> dict[str, float]:
    """In a process of its own: memory that one has had it keeps."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return dict(pool.apply(_steps, (num_lines,)))


def _steps(num_lines: int) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (folder / "input").open("wb") as file:
            for each in range(num_lines):
                file.write(line(each, "tiny", 16))
        found["input_mib"] = round((folder / "input").stat().st_size / 2**20, 1)
        began_s = _note(found, "before", time.monotonic())
        with (folder / "input").open("rb") as source:
            counted = index_lines(source, folder, URL, max_lines=num_lines, max_line_bytes=1 << 20)
        assert counted == num_lines, counted
        began_s = _note(found, "validated", began_s)
        with Spool(folder, num_lines) as spool:
            for some in _results(folder, spool):
                spool.commit(some)
        began_s = _note(found, "answered", began_s)
        with Spool(folder, num_lines) as spool:
            assert sum(spool.counts) == num_lines, spool.counts
        _note(found, "taken_over", began_s)
    found["peak_mib"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)
    return found


def _note(found: dict[str, float], step: str, began_s: float) -> float:
    now_s = time.monotonic()
    found[f"{step}_mib"] = round(psutil.Process().memory_info().rss / 2**20, 1)
    found[f"{step}_s"] = round(now_s - began_s, 1)
    return now_s


def _results(folder: Path, spool: Spool) -> Iterator[list[Written]]:
    """Of every line, which is read for it, an answer of its size."""
    index, results = LineIndex(folder / "index", spool.is_done), list[Written]()
    with (folder / "input").open("rb") as source:
        while (entry := index.next()) is not None:
            data = read_line(source, entry)
            results.append(Written(entry.position, LineOutcome.SUCCEEDED, 0, data))
            if len(results) == _TOGETHER:
                yield results
                results = []
    yield results
    index.close()
