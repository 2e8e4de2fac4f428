"""What the parts of the memory plan really take, beside what was predicted.

On a CPU by the process's resident memory that belongs to no file: its growth while the weights were loaded,
the blocks of the cache that were ever written (untouched pages cost nothing), and the rest of the peak since,
which is workspace. Pages of files are left out: checkpoints are read through them, and code of libraries that
is used for the first time is neither weights nor workspace. On an accelerator by the allocator's own counts.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from engine.types import MemoryPlan, MemoryUse
from runtime.memory import give_back

_STATUS = Path("/proc/self/status")
# Reports of use (one every five seconds under load) from one return of freed memory to the next.
_REPORTS_TO_GIVE_BACK = 6
# Stage in which the cache is allocated: what was loaded before it are the weights.
_CACHE_STAGE = "allocate KV cache"


def _host_bytes(field: str) -> int:
    try:
        found = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _own_bytes() -> int:
    """Resident memory that is not the page of a file."""
    return _host_bytes("VmRSS") - _host_bytes("RssFile")


def _cuda() -> Any:
    """The accelerator's allocator, when the runner uses one."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


class MemoryWatch:
    """Follows one engine; made when its libraries are imported and nothing is loaded."""

    def __init__(self) -> None:
        give_back()
        # The interpreter and its libraries, which no plan counts.
        self._before = _own_bytes()
        self._loaded = 0
        self._allocated = 0
        self._num_reports = 0

    def stage(self, stage: str, fraction: float) -> None:
        """A part of start-up is done."""
        cuda = _cuda()
        if cuda is None and stage == _CACHE_STAGE:
            # Weights are packed after they were read, and what they were packed from is garbage. The cache
            # itself is untouched, and costs nothing yet.
            give_back()
            self._loaded = _own_bytes() - self._before
            return
        now = int(cuda.memory_allocated()) if cuda is not None else _own_bytes() - self._before
        if stage == _CACHE_STAGE:
            if fraction >= 1:
                self._allocated = max(0, now - self._loaded)
        elif not self._allocated:
            # Memory allocated after the cache (captured graphs) counts as workspace.
            self._loaded = now

    def start(self) -> None:
        """Start-up is over, and what it freed is given back: peaks count from here."""
        cuda = _cuda()
        if cuda is not None:
            cuda.reset_peak_memory_stats()
            return
        try:
            # 5 resets the peak of resident memory (proc(5)).
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            return

    def use(self, plan: MemoryPlan, num_touched_blocks: int) -> MemoryUse:
        """What is used now, in bytes; `num_touched_blocks` were written at least once.

        Now and then what was freed goes back to the system. glibc before 2.38 does not find an aligned piece
        again that it has freed, and torch's tensors are such pieces: as sizes change from step to step the
        heap grows by a mebibyte in a thousand requests of all kinds, though nothing more is in use.
        """
        self._num_reports += 1
        if self._num_reports % _REPORTS_TO_GIVE_BACK == 0:
            give_back()
        cuda = _cuda()
        if cuda is not None:
            cache, peak = self._allocated, int(cuda.max_memory_allocated())
        else:
            # Window blocks were written no oftener than blocks.
            in_windows = min(num_touched_blocks, plan.num_window_blocks) * plan.window_bytes_per_token
            others = num_touched_blocks * (plan.kv_bytes_per_token - plan.window_bytes_per_token)
            cache = min(plan.kv_cache_bytes, plan.block_size * (in_windows + others))
            peak = _host_bytes("VmHWM") - _host_bytes("RssFile") - self._before
        return MemoryUse(
            weights_bytes=self._loaded,
            kv_cache_bytes=cache,
            workspace_bytes=max(0, peak - self._loaded - cache),
        )
