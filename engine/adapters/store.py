"""The adapters that an engine knows, and the slots in which some of them are. No torch.

Who schedules says which adapter goes into which slot, and uses none that is still on its way: so a thread
reads and converts an adapter while steps compute with the others. An adapter goes by its version here, so by
its files: other files have another one (engine/service/adapters.py).
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from engine.adapters.peft import AdapterFile, Module, check_adapter
from engine.adapters.version import AdapterError
from engine.model.records import Linear, ModelRecord
from kernels.adapters.low_rank import LowRankChange

_log = logging.getLogger(__name__)


class Changes(Protocol):
    """What the adapters of all slots add to one linear layer."""

    def put(self, slot: int, parts: Sequence[LowRankChange | None]) -> None:
        """Puts an adapter in a slot; None where it leaves a part alone."""


def with_slots(record: ModelRecord, make: Callable[[int, Sequence[int]], Changes]) -> list[Linear]:
    """The linear layers that take adapters, with the slots that `make` gives for their inputs and the outputs
    of their parts.
    """
    linears = [linear for layer in record.layers for linear in layer.linears() if linear.parts]
    for linear in linears:
        linear.changes = make(linear.inputs, [size for _, size in linear.parts])
    return linears


def modules_of(linears: Sequence[Linear]) -> dict[str, Module]:
    """By name, what linear layers are in the checkpoint, of which they may be parts."""
    found = {}
    for linear in linears:
        cuts = linear.cuts or (None,) * len(linear.parts)
        for (name, outputs), cut in zip(linear.parts, cuts, strict=True):
            sizes = [outputs, linear.inputs]
            if cut is not None:
                sizes[cut.axis] = cut.size
            found[name] = Module(inputs=sizes[1], outputs=sizes[0])
    return found


def put_adapter(linears: Sequence[Linear], slot: int, file: AdapterFile) -> None:
    """Reads an adapter, or what these linear layers have of it, into a slot. Raises AdapterError, also where
    its files change meanwhile.
    """
    file.check_unchanged()
    for linear in linears:
        cuts = linear.cuts or (None,) * len(linear.parts)
        parts = zip(linear.parts, cuts, strict=True)
        linear.changes.put(slot, [file.change_of(module, cut) for (module, _), cut in parts])
    file.check_unchanged()


class AdapterStore:
    """Knows adapters by name and reads them into slots. Asked in one thread."""

    def __init__(self, linears: Sequence[Linear], *, max_rank: int) -> None:
        """Of linear layers that have slots."""
        self._linears = linears
        self.modules: Mapping[str, Module] = modules_of(linears)
        self._max_rank = max_rank
        # By folder: the same adapter may lie in several, of which one may change.
        self._files: dict[str, dict[str, AdapterFile]] = {}
        self._thread = ThreadPoolExecutor(1, "adapters")
        # (slot, why it failed or ""), as they were done.
        self._finished: deque[tuple[int, str]] = deque()
        # (token of an addition, why it cannot be served or "").
        self._answers: deque[tuple[int, str]] = deque()

    @classmethod
    def of_none(cls) -> AdapterStore:
        """Of a model without slots."""
        return cls((), max_rank=0)

    def add_later(self, token: int, name: str, folder: str) -> None:
        """As `add`, in the thread; `answers` says what came of it."""
        self._thread.submit(self._add, token, name, folder)

    def answers(self) -> list[tuple[int, str]]:
        """Additions that are done since the last call, each with why it cannot be served, else ""."""
        return _taken(self._answers)

    def _add(self, token: int, name: str, folder: str) -> None:
        problem = ""
        try:
            self.add(name, folder)
        except AdapterError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("the adapter in %s was not added", folder)
            problem = f"{folder}: {type(error).__name__}: {error}"
        self._answers.append((token, problem))

    def add(self, name: str, folder: str) -> None:
        """Makes the adapter in a folder known, if it can be served; it stays on disk. Raises AdapterError."""
        if not self.modules:
            raise AdapterError(
                "engine.adapters.slots = 0: this engine keeps no memory for adapters; set how many may be in "
                "memory at a time"
            )
        file = check_adapter(Path(folder), self.modules, max_rank=self._max_rank)
        self._files.setdefault(name, {})[folder] = file

    def drop(self, name: str) -> None:
        """Forgets an adapter that nobody will ask for any more. What is in a slot stays there."""
        self._files.pop(name, None)

    def begin(self, slot: int, name: str) -> None:
        """Begins to read an adapter into a slot that nobody computes with."""
        self._thread.submit(self._load, slot, name)

    def finished(self) -> list[tuple[int, str]]:
        """Slots that are read since the last call, each with why that failed, else ""."""
        return _taken(self._finished)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _load(self, slot: int, name: str) -> None:
        problem, began_s = "", time.monotonic()
        try:
            self._read(slot, name)
        except AdapterError as error:
            problem = str(error)
        except Exception as error:
            _log.exception("adapter %s was not loaded", name)
            problem = f"it was not loaded: {type(error).__name__}: {error}"
        else:
            _log.info(
                "adapter %s is in slot %d after %.0f ms", name, slot, 1e3 * (time.monotonic() - began_s)
            )
        self._finished.append((slot, problem))

    def _read(self, slot: int, name: str) -> None:
        problem = AdapterError("it was removed before it was loaded; add it again")
        for file in list(self._files.get(name, {}).values()):
            try:
                self._put(slot, file)
            except AdapterError as error:
                problem = error
            else:
                return
        raise problem

    def _put(self, slot: int, file: AdapterFile) -> None:
        put_adapter(self._linears, slot, file)


def _taken(line: deque[tuple[int, str]]) -> list[tuple[int, str]]:
    """What is in it now; more may join at the other end meanwhile."""
    return [line.popleft() for _ in range(len(line))]
