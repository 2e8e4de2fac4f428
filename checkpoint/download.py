"""One file over HTTP: goes on where it was broken off, and is what its digest says, or is deleted."""

from __future__ import annotations

import errno
import hashlib
import http.client
import sys
import time
import urllib.error
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO
from urllib.parse import urlsplit

from runtime.errors import ConfigError

# Opens a URL from an offset on: (body, the offset that it really begins at).
Opener = Callable[[str, int], tuple[IO[bytes], int]]

_CHUNK_BYTES = 256 * 1024
# Attempts in a row that bring nothing, and the pauses before the next; one that brings something begins anew.
_PAUSES_S = (0.5, 1.0, 2.0)
_BROKEN = (OSError, http.client.HTTPException)
# No server is to blame for these.
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Wanted(NamedTuple):
    """What is to be there in the end."""

    name: str
    size_bytes: int
    sha256: str


class Unreachable(Exception):
    """Nobody gives the file; in words, who was asked and what they said."""


class DownloadMeter:
    """Says on a terminal how far it is, and elsewhere only that it begins and ends."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = sys.stderr if out is None else out
        self._told = -1

    def tell(self, wanted: Wanted, num_bytes: int) -> None:
        """So many bytes are there."""
        percent = 100 * num_bytes // max(wanted.size_bytes, 1)
        if percent == self._told or not (self._out.isatty() or percent in (0, 100) or self._told < 0):
            return
        self._told = percent
        end = "\r" if self._out.isatty() and percent < 100 else "\n"
        megabytes = f"{num_bytes / 1e6:.0f} of {wanted.size_bytes / 1e6:.0f} MB"
        print(f"fetching {wanted.name}: {megabytes}", end=end, file=self._out, flush=True)


def download(urls: Iterable[str], part: Path, wanted: Wanted, open_at: Opener, meter: DownloadMeter) -> None:
    """Brings `part` to its end, from the first of the URLs that gives it. Raises Unreachable where none does,
    which leaves what is there for another time, and ConfigError where it is another file, which is deleted.
    """
    said: list[str] = []
    for url in urls:
        if said_now := _from(url, part, wanted, open_at, meter):
            said.append(f"{urlsplit(url).hostname}: {said_now}")
            continue
        found = digest(part)
        if found != wanted.sha256:
            part.unlink()
            raise ConfigError(
                f"{wanted.name} from {urlsplit(url).hostname} has the SHA-256 {found} and not "
                f"{wanted.sha256}; it is deleted: ask whoever keeps that server, or name another one"
            )
        return
    raise Unreachable("; ".join(said) or "no package index has it")


def _from(url: str, part: Path, wanted: Wanted, open_at: Opener, meter: DownloadMeter) -> str:
    """Why the file is not whole; "" where it is."""
    pauses, failure = iter(_PAUSES_S), ""
    while (size := part.stat().st_size if part.exists() else 0) != wanted.size_bytes:
        if size > wanted.size_bytes:
            part.unlink()
            size = 0
        try:
            _append(url, part, size, wanted, open_at, meter)
        except urllib.error.HTTPError as error:
            failure = f"{error.code} {error.reason}"
            if error.code < 500:
                # A place behind the end, or no such file.
                return failure
        except _BROKEN as error:
            if getattr(error, "errno", None) in _OF_THE_DISK:
                raise
            failure = str(getattr(error, "reason", error)) or type(error).__name__
        else:
            failure = "it was broken off"
        reached = part.stat().st_size if part.exists() else 0
        if reached == wanted.size_bytes:
            break
        if reached > size:
            pauses = iter(_PAUSES_S)
            continue
        pause_s = next(pauses, None)
        if pause_s is None:
            return failure
        time.sleep(pause_s)
    meter.tell(wanted, wanted.size_bytes)
    return ""


def _append(url: str, part: Path, size: int, wanted: Wanted, open_at: Opener, meter: DownloadMeter) -> None:
    body, begin = open_at(url, size)
    with body, part.open("r+b" if part.exists() else "wb") as target:
        target.seek(begin)
        target.truncate()
        meter.tell(wanted, begin)
        while (chunk := body.read(_CHUNK_BYTES)) and target.tell() <= wanted.size_bytes:
            target.write(chunk)
            meter.tell(wanted, min(target.tell(), wanted.size_bytes))


def digest(file: Path, new: Callable[[], Any] = hashlib.sha256) -> str:
    """The SHA-256 of a file, in hexadecimal; or what `new` makes."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, new).hexdigest()
