"""A worker offers its core to others twice a millisecond.

The lowest priority alone does not make a process wait. Where the kernel has to choose between it and one that
has just used up its share, it may choose the former, and looks again at its next tick, up to 4 ms later
(EEVDF, where who is ahead of its share is not eligible). A timer makes the worker ask it to choose again.
"""

from __future__ import annotations

import ctypes
import signal
import types

# Seconds of work between two offers.
_EVERY_S = 0.0005


class Yielding:
    """Yields twice a millisecond of a block. For the only thread of a process that takes SIGALRM, which is
    used for nothing else.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=False)
        # The library's own function is the signal's handler: one written in Python would wait until the
        # interpreter is back from whatever library computes. It takes no argument, and leaves errno alone.
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGALRM, ctypes.cast(libc.sched_yield, ctypes.c_void_p))

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, _EVERY_S, _EVERY_S)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
