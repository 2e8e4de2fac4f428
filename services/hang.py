"""Tells a process of this machine that hangs from one that is busy."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from services.silence import TURNS, Silence

# A process that wants less than this share of one processor does not compute.
_BUSY_SHARE = 0.05


class ProcessSilence(Silence):
    """Silence of a process: while it computes, or waits for a processor, it has `busy_limit_s`.

    What its children compute counts as its own work where it `waits_for_children`.
    """

    def __init__(
        self, limit_s: float, pid: int, busy_limit_s: float, *, waits_for_children: bool = False
    ) -> None:
        super().__init__(limit_s)
        self._pid = pid
        self._busy_limit_s = busy_limit_s
        self._waits_for_children = waits_for_children
        self._wanted_before_s = 0.0

    def is_dead(self) -> bool:
        """Judges by the second half of every `limit_s` of silence."""
        place = self.num_turns % TURNS
        if place == TURNS // 2:
            self._wanted_before_s = self._wanted_s()
        if place:
            return False
        if self.num_turns * self.turn_s >= self._busy_limit_s:
            return True
        wanted_s = self._wanted_s() - self._wanted_before_s
        # Who waits for a processor is told to have waited only when it gets one.
        return wanted_s < _BUSY_SHARE * self.turn_s * TURNS / 2 and not self._is_runnable()

    def _wanted_s(self) -> float:
        """Seconds of processor time that the process has used or waited for so far; 0 when it is gone."""
        with contextlib.suppress(psutil.Error):
            return sum(map(_wanted_s, self._processes()))
        return 0.0

    def _is_runnable(self) -> bool:
        """Whether it has, or waits for, a processor now."""
        with contextlib.suppress(psutil.Error):
            return any(map(_is_runnable, self._processes()))
        return False

    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self._pid)
        return [process, *(process.children(recursive=True) if self._waits_for_children else [])]


def _wanted_s(process: psutil.Process) -> float:
    wanted_ns = 0
    for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
        # Linux: nanoseconds on a processor, nanoseconds in its queue, and how often.
        with contextlib.suppress(OSError, ValueError):
            wanted_ns += sum(map(int, thread.read_text().split()[:2]))
    used = process.cpu_times()
    return wanted_ns / 1e9 or used.user + used.system


def _is_runnable(process: psutil.Process) -> bool:
    for thread in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        # The state follows the name, which is in parentheses and may have some of its own.
        with contextlib.suppress(OSError):
            if thread.read_text().rpartition(")")[2].split()[:1] == ["R"]:
                return True
    return bool(process.status() == psutil.STATUS_RUNNING)
