"""Host memory: how the process holds it, and the part that the offload tier keeps blocks in.

Freed memory is kept in the process, as a step frees and takes the same megabytes again and again: glibc
returns large freed pieces to the kernel, which then zeroes fresh pages for the next step; on a CPU that costs
more than the arithmetic (bundled model, 32 decoding sequences: 78 ms per step so, 33 ms with this).
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from services.errors import ConfigError

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# The largest value that glibc takes for the mmap threshold on 64-bit machines.
_MMAP_THRESHOLD_BYTES = 32 << 20
_TRIM_THRESHOLD_BYTES = 512 << 20


def keep_freed_memory() -> None:
    """Sets glibc's allocator so; does nothing elsewhere. Call before the first large allocation."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    mallopt(_ARENA_MAX, 1)
    mallopt(_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


class HostArena:
    """Rows of bytes [rows, row_bytes] in host memory. Pinned ones are registered with CUDA as a whole, since
    torch's own pinned allocator would round the size up to a power of two.
    """

    def __init__(self, num_rows: int, row_bytes: int, *, pinned: bool) -> None:
        import torch

        # Its functions have no types.
        self._cuda: Any = torch.cuda
        self.rows = torch.empty(num_rows, row_bytes, dtype=torch.uint8)
        self.pinned = pinned and num_rows > 0
        if self.pinned:
            status = self._cuda.cudart().cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, 0)
            if int(status) != 0:
                self.pinned = False
                raise ConfigError(
                    f"engine.cache.host_bytes: CUDA could not pin {self.rows.nbytes} bytes of host memory "
                    f"(error {int(status)}); lower it, or raise the limit of locked memory (ulimit -l)"
                )

    def close(self) -> None:
        """Unregisters; further calls do nothing."""
        if self.pinned:
            self.pinned = False
            self._cuda.cudart().cudaHostUnregister(self.rows.data_ptr())
