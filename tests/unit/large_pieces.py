"""Large pieces of memory that are still held: bytes are nothing that the garbage collector knows of."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_LIMIT_S = 10.0
_LARGE = 1 << 20


@asynccontextmanager
async def nothing_large_is_kept(but: str = "no such file") -> AsyncIterator[None]:
    """Waits, once the block is over, until no piece of a megabyte that was taken in it is held any more, save
    those that code in the file `but` has taken.
    """
    tracemalloc.start(20)
    try:
        yield
        async with asyncio.timeout(_LIMIT_S):
            while found := [place for size, place in _pieces() if size >= _LARGE and but not in place[-1]]:
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError("\n\n".join(map("\n".join, found))) from None
    finally:
        tracemalloc.stop()


def _pieces() -> list[tuple[int, list[str]]]:
    return [(each.size, list(map(str, each.traceback))) for each in tracemalloc.take_snapshot().traces]
