"""Adapters of a model that ranks share: each reads its own part of an adapter into its slot.

The leader's store checks an adapter against the whole model, whose modules the other ranks have named, and
has all read it: a slot is filled when it is so in all ranks, and an adapter that one cannot read is refused
for all. The others have no names: they are handed files that were checked, and the number of a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

from engine.adapters.peft import AdapterFile
from engine.adapters.store import AdapterStore, put_adapter
from engine.adapters.version import AdapterError
from engine.model.records import Linear
from engine.runner.ranks.group import RankGroup, SlotTask


class RankedAdapters(AdapterStore):
    """The leader's adapters, of which the other ranks have their parts."""

    def __init__(self, group: RankGroup, linears: Sequence[Linear], *, max_rank: int) -> None:
        super().__init__(linears, max_rank=max_rank)
        self._group = group
        self.modules = {**self.modules, **group.modules}

    def _put(self, slot: int, file: AdapterFile) -> None:
        self._group.tell(SlotTask(slot, file))
        try:
            super()._put(slot, file)
        finally:
            # Whatever happened here: the next answers belong to the next adapter.
            problems = self._group.adapter_answers()
        if problem := next(filter(None, problems), ""):
            raise AdapterError(problem)


class RankAdapters:
    """The slots of a rank behind the first, which a thread fills while steps compute; it alone answers."""

    def __init__(self, linears: Sequence[Linear], connection: Connection) -> None:
        self._linears, self._connection = linears, connection
        self._thread = ThreadPoolExecutor(1, "adapters")

    def begin(self, task: SlotTask) -> None:
        """Begins to read a part of an adapter, and answers the leader with why that failed, else ""."""
        self._thread.submit(self._put, task)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _put(self, task: SlotTask) -> None:
        problem = ""
        try:
            put_adapter(self._linears, task.slot, task.file)
        except AdapterError as error:
            problem = str(error)
        except Exception as error:
            problem = f"a rank did not load it: {type(error).__name__}: {error}"
        try:
            self._connection.send(problem)
        except OSError:
            # The leader is gone, and the process ends for that.
            return
