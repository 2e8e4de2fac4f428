"""Which gateway was asked lately by whoever is no batch: all that share a folder tell each other, by the time
of a file in it. Lines of a batch give way to requests that come through another gateway, too.
"""

from __future__ import annotations

import os
from pathlib import Path


class AskedMark:
    """See above. Clocks of machines are not compared: what counts is that the file's time has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen_ns: int | None = None

    def exchange(self, *, is_asked: bool) -> bool:
        """Tells whether this gateway was asked since it told last; whether another one was. Not for the event
        loop; raises OSError.
        """
        before_ns = self._time_ns()
        if is_asked:
            self._path.touch(mode=0o600)
            os.utime(self._path)
        has_heard = self._seen_ns is not None and before_ns != self._seen_ns
        self._seen_ns = self._time_ns()
        return has_heard

    def _time_ns(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0
