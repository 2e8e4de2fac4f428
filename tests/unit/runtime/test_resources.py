"""Limits of containers, as cgroups of both versions state them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from runtime.resources import available_bytes, num_cores

GIB = 1 << 30


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "20000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_a_quota_of_time_counts_as_cores(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(tmp_path, files)
    assert num_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 64 * GIB),
        ({"memory.max": "max", "memory.current": "5"}, 64 * GIB),
        ({"memory.max": str(4 * GIB), "memory.current": str(GIB)}, 3 * GIB),
        (
            {
                "memory.max": str(4 * GIB),
                "memory.current": str(4 * GIB),
                "memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file 9",
            },
            2 * GIB,
        ),
        (
            {
                "memory/memory.limit_in_bytes": str(4 * GIB),
                "memory/memory.usage_in_bytes": str(3 * GIB),
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}",
            },
            2 * GIB,
        ),
        ({"memory.max": str(GIB), "memory.current": str(2 * GIB)}, 0),
    ],
)
def test_memory_within_the_limit_without_idle_pages_of_files(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = psutil.virtual_memory()._replace(available=64 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    write(tmp_path, files)
    assert available_bytes(tmp_path) == expected
