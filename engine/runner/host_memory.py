"""Host memory that the offload tier keeps blocks in."""

from __future__ import annotations

from typing import Any

from runtime.errors import ConfigError


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
