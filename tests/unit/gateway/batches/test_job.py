"""A batch's own bookkeeping, where an event loop may run its parts in any order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from gateway.batches.job import BatchJob

FAR_S = 1 << 40


class OneLine:
    """An index with a single line."""

    def __init__(self) -> None:
        self.lines: list[Any] = [SimpleNamespace(position=0, line=1, fault=None)]

    def next(self) -> Any:
        return self.lines.pop() if self.lines else None


async def test_a_line_keeps_its_batch_open_before_its_task_has_begun() -> None:
    batch = SimpleNamespace(api="openai", id="batch_1", deadline_unix_s=FAR_S)
    lease: Any = SimpleNamespace(batch=batch, tenant="acme", cancelled_unix_s=0)
    store = SimpleNamespace(now_ms=lambda: 0)
    config = SimpleNamespace(lease_s=1e9)
    parts: Any = SimpleNamespace(forms={"openai": None}, folder=Path(), store=store, config=config)
    job = BatchJob(lease, parts)
    index: Any = OneLine()
    job._index = index
    entry = job.take()
    assert entry is not None
    assert job.take() is None
    # All lines were taken, and nothing was answered: it waits for the one that is about to begin.
    assert not await job._has_ended()

    async def failing(*_: Any) -> Any:
        raise asyncio.CancelledError

    job._answer = failing  # type: ignore[method-assign]
    assert await job.answer(entry) is None
    assert await job._has_ended()
