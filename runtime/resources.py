"""What of the machine this process may use: processors and memory, within its container's limits.

A container's share of processors is a quota of time, which neither affinity nor the number of cores shows; as
many threads as the machine has cores would use it up early in each period, and then all wait.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import psutil

_CGROUPS = Path("/sys/fs/cgroup")


def num_cores(cgroups: Path = _CGROUPS) -> int:
    """Processors that the process may run on, or fewer where a quota of time (cgroups v2, v1) allows less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    v1 = cgroups / "cpu"
    quota, _, period = _read(cgroups / "cpu.max").partition(" ")
    if not quota:
        quota, period = _read(v1 / "cpu.cfs_quota_us"), _read(v1 / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit() and int(period):
        cores = min(cores, max(1, math.ceil(int(quota) / int(period))))
    return cores


def available_bytes(cgroups: Path = _CGROUPS) -> int:
    """Memory that the process may still take: what the machine has free, within the container's limit.

    Pages of files that nobody uses at present count as free, as they are given up on demand: else a container
    that has just read a checkpoint would have no memory for it.
    """
    free = psutil.virtual_memory().available
    v1 = cgroups / "memory"
    for limit_file, used_file, statistics, idle in (
        (cgroups / "memory.max", cgroups / "memory.current", cgroups / "memory.stat", "inactive_file"),
        (
            v1 / "memory.limit_in_bytes",
            v1 / "memory.usage_in_bytes",
            v1 / "memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, used = _read(limit_file), _read(used_file)
        if limit.isdigit() and used.isdigit():
            counts = dict(line.split(" ", 1) for line in _read(statistics).splitlines() if " " in line)
            free = min(free, max(int(limit) - int(used) + int(counts.get(idle, 0)), 0))
    return free


def cpuinfo(*keys: str) -> list[str]:
    """What Linux says of each processor under these keys of /proc/cpuinfo; empty elsewhere."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith(keys)]


def _read(path: Path) -> str:
    """A file's text; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
