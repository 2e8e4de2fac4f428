"""A limit of memory for a whole stack: a control group (Linux, as root) that it is started in.

Version 2 of control groups is used where it has the controller of memory, version 1 elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/sys/fs/cgroup")
_NAME = f"millrace-neighbour-{os.getpid()}"


class _Files(NamedTuple):
    """Names of one version."""

    limit: str
    used: str
    # Of `memory.stat`: pages of files that nobody uses at present, which are given up on demand.
    idle: str
    events: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "memory.oom_control")
_V2 = _Files("memory.max", "memory.current", "inactive_file", "memory.events")


class MemoryGroup:
    """Processes whose memory is limited together."""

    def __init__(self, folder: Path, files: _Files) -> None:
        self._folder = folder
        self._files = files

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command: starts it in the group, where its children are as well."""
        return ("/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._folder / "cgroup.procs"))

    def used_bytes(self) -> int:
        """What the processes need: all but idle pages of files."""
        return int(self._text(self._files.used)) - self._counts("memory.stat")[self._files.idle]

    def limit(self, num_bytes: int) -> None:
        """Whoever takes more is killed."""
        (self._folder / self._files.limit).write_text(str(num_bytes))

    def num_killed(self) -> int:
        """Processes that were killed for it."""
        return self._counts(self._files.events)["oom_kill"]

    def _counts(self, name: str) -> dict[str, int]:
        lines = (line.split() for line in self._text(name).splitlines())
        return {key: int(value) for key, value in lines}

    def _text(self, name: str) -> str:
        return (self._folder / name).read_text()


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """A group beside this process's own, or below it; raises SystemExit where none can be made."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {name: path.strip("/") for _, controllers, path in lines for name in controllers.split(",")}
    if "memory" in paths:
        folder, files = _ROOT / "memory" / paths["memory"] / _NAME, _V1
    else:
        # A group that has processes has no groups with controllers below it.
        folder, files = (_ROOT / paths[""]).parent / _NAME if paths[""] else _ROOT / _NAME, _V2
    try:
        folder.mkdir()
        if not (folder / files.limit).exists():
            raise OSError(f"{folder} has no {files.limit}")
    except OSError as error:
        raise SystemExit(f"--memory-mb needs a control group for memory, as root on Linux: {error}") from None
    try:
        yield MemoryGroup(folder, files)
    finally:
        folder.rmdir()
