"""What a stream shows of byte tokens before it can know what the whole run is."""

from __future__ import annotations

import itertools


def shown_at_once(pieces: list[str]) -> list[str]:
    """The pieces with the characters at the beginning of each invalid run of bytes spelled out: the reference
    would show none of that run.
    """
    told: list[str] = []
    for is_run, group in itertools.groupby(pieces, lambda piece: piece.startswith("<0x")):
        run = list(group)
        if is_run:
            raw = bytes(int(piece[3:5], 16) for piece in run)
            try:
                raw.decode()
            except UnicodeDecodeError as error:
                told += raw[: error.start].decode()
                run = run[error.start :]
        told += run
    return told
