"""Distinguishes a process of this machine that hangs from one that is busy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from runtime.streams import NUM_CHECKS, Silence

# A process that wants less than this share of one processor does not compute.
_BUSY_SHARE = 0.05


class ProcessSilence(Silence):
    """Silence of a process: while it computes, or waits for a processor or a disk, it has `busy_limit_s`.

    What its children compute counts as its own work where it `waits_for_children`.
    """

    def __init__(
        self, limit_s: float, pid: int, busy_limit_s: float, *, waits_for_children: bool = False
    ) -> None:
        super().__init__(limit_s)
        self._pid = pid
        self._busy_limit_s = busy_limit_s
        self._waits_for_children = waits_for_children
        # Processor seconds that each process had wanted half-way through the limit, by process id.
        self._wanted_before_s: dict[int, float] = {}

    def is_dead(self) -> bool:
        """Judges by the second half of every `limit_s` of silence."""
        check = self.num_silent % NUM_CHECKS
        if check == NUM_CHECKS // 2:
            self._wanted_before_s = self._wanted_s()
        if check:
            return False
        if self.num_silent * self.interval_s >= self._busy_limit_s:
            return True
        # The kernel counts a wait for a processor only when it has ended, so one that waits now is sought.
        return not self._was_busy(self._wanted_s()) and not any(map(_is_at_work, self._processes()))

    def _was_busy(self, wanted_s: dict[int, float]) -> bool:
        """Whether enough was wanted since the first half. That processes ended, as a compiler's do, was work,
        and that threads did, too: what they wanted is no longer in the sum.
        """
        before_s = self._wanted_before_s
        since_s = sum(abs(value - before_s.get(pid, 0.0)) for pid, value in wanted_s.items())
        return (
            bool(before_s.keys() - wanted_s.keys())
            or since_s >= _BUSY_SHARE * self.interval_s * NUM_CHECKS / 2
        )

    def _wanted_s(self) -> dict[int, float]:
        """Seconds of processor time that each process has used or waited for so far, of those there are."""
        found = ((each.pid, _wanted_s(each)) for each in self._processes())
        return {pid: wanted_s for pid, wanted_s in found if wanted_s is not None}

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self._pid)
            return [process, *(process.children(recursive=True) if self._waits_for_children else [])]
        return []


def _wanted_s(process: psutil.Process) -> float | None:
    wanted_ns = 0
    for thread in _tasks(process):
        # Linux: nanoseconds on a processor, nanoseconds in its queue, and how often.
        with contextlib.suppress(OSError, ValueError):
            wanted_ns += sum(map(int, (thread / "schedstat").read_text().split()[:2]))
    with contextlib.suppress(psutil.Error):
        used = process.cpu_times()
        return wanted_ns / 1e9 or used.user + used.system
    return None


def _is_at_work(process: psutil.Process) -> bool:
    for thread in _tasks(process):
        # The state follows the name, which is in parentheses and may have some of its own. Who waits for a
        # disk cannot say anything either.
        with contextlib.suppress(OSError):
            if (thread / "stat").read_text().rpartition(")")[2].split()[:1] in (["R"], ["D"]):
                return True
    with contextlib.suppress(psutil.Error):
        return bool(process.status() == psutil.STATUS_RUNNING)
    return False


def _tasks(process: psutil.Process) -> list[Path]:
    """Its threads, where the system tells of them."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{process.pid}/task").iterdir())
    return []
