"""Models that are loaded on demand: requests wait here until an engine has theirs, and may say how far it is.

The supervisor decides what is loaded; this says who waits and what is in use. What it says is unloading gets
no new request: who asked a moment before is counted as open, and the engine ends when nobody is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import msgspec

from contract.errors import MillraceError, Reason
from gateway.engines.fleet import Fleet
from gateway.models.catalog import ServedModel
from runtime.loads import LINE_BYTES, Demands, LoadState, LoadStates, ModelDemand, line

_log = logging.getLogger(__name__)

# What is open is counted this often, and who waits is told this often how far the load is, in seconds.
_COUNT_S = 0.1
_TELL_S = 1.0
_CONNECT_S = 0.5
# A supervisor that is not there for so long loads nothing.
_ALONE_S = 10.0
# Asked to come back after so long where nothing is known of how long a load takes.
_USUAL_LOAD_S = 5.0

# Told how far a load is, now and then.
Tell: TypeAlias = Callable[[str, LoadState], Awaitable[None]]


class ModelLoads:
    """One gateway's part. `run` until cancelled; without an address nothing is loaded on demand."""

    def __init__(self, address: str, fleet: Fleet) -> None:
        self._address = address
        self._fleet = fleet
        # Counts the requests that engines have, by version of their model.
        self.running: Callable[[], Counter[str]] = Counter
        self._waiting: Counter[str] = Counter()
        # Let through, and not with an engine yet.
        self._holding: Counter[str] = Counter()
        self._states = LoadStates(number=0, models={})
        self._changed = asyncio.Event()
        self._alone_since_s: float | None = 0.0

    def state(self, key: str) -> LoadState:
        """Where a version of a model stands, as the supervisor said last."""
        return self._states.models.get(key, LoadState())

    @asynccontextmanager
    async def using(self, served: ServedModel, tell: Tell | None = None) -> AsyncIterator[None]:
        """A time in which the model stays loaded: long enough to hand a request to its engine. Waits for the
        load. Raises QUEUE_LIMIT_EXCEEDED where too many do, and ENGINE_UNAVAILABLE where it cannot be loaded.
        """
        if not served.config.is_on_demand:
            yield
            return
        if not self._is_there(served.key):
            await self._wait(served, tell)
        self._holding[served.key] += 1
        try:
            yield
        finally:
            self._holding[served.key] -= 1

    def _is_there(self, key: str) -> bool:
        return self.state(key).state == "loaded" and self._fleet.serving(key)

    async def _wait(self, served: ServedModel, tell: Tell | None) -> None:
        key, config = served.key, served.config
        before = self.state(key)
        if self._waiting[key] >= config.load_queue:
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"model {served.name!r} is being loaded and {config.load_queue} requests wait for it "
                f"(models.{served.name}.load_queue); try again later, or ask for another model",
                field="model",
                retry_after_s=before.left_s or _USUAL_LOAD_S,
            )
        self._waiting[key] += 1
        self._changed.set()
        clock = asyncio.get_running_loop().time
        told_s = clock()
        try:
            while not self._is_there(key):
                self._check(served, before.num_failures)
                if tell is not None and clock() - told_s >= _TELL_S:
                    told_s = clock()
                    await tell(served.name, self.state(key))
                await asyncio.sleep(_COUNT_S)
        finally:
            self._waiting[key] -= 1

    def _check(self, served: ServedModel, num_failures: int) -> None:
        """Raises why it is of no use to wait on."""
        state = self.state(served.key)
        why = ""
        if state.num_failures > num_failures:
            why = state.why
        elif (since_s := self._alone_since_s) is not None and (
            asyncio.get_running_loop().time() - since_s > _ALONE_S
        ):
            why = "nobody here loads models: the supervisor does not answer"
        if why:
            raise MillraceError(
                Reason.ENGINE_UNAVAILABLE,
                f"model {served.name!r} cannot be loaded: {why}",
                field="model",
                retry_after_s=_USUAL_LOAD_S,
            )

    # --- the supervisor ---

    async def run(self) -> None:
        """Speaks with the supervisor, again and again."""
        self._alone_since_s = asyncio.get_running_loop().time()
        while self._address:
            with contextlib.suppress(OSError, msgspec.DecodeError, ValueError):
                reader, writer = await asyncio.open_unix_connection(self._address, limit=LINE_BYTES)
                try:
                    await self._speak(reader, writer)
                finally:
                    writer.close()
                    self._alone_since_s = asyncio.get_running_loop().time()
                    # What stands there may end at any time.
                    self._states = LoadStates(number=0, models={})
            await asyncio.sleep(_CONNECT_S)

    async def _speak(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        telling = asyncio.create_task(self._tell_demand(writer), name="tell demand")
        try:
            while text := await reader.readline():
                self._states = msgspec.json.decode(text, type=LoadStates)
                self._alone_since_s = None
                self._changed.set()
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_demand(self, writer: asyncio.StreamWriter) -> None:
        last = b""
        while True:
            now = line(self._demands())
            if now != last:
                writer.write(now)
                await writer.drain()
                last = now
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_COUNT_S):
                    await self._changed.wait()

    def _demands(self) -> Demands:
        num_open = self.running() + self._holding
        keys = sorted({*num_open, *(+self._waiting)})
        found = {key: ModelDemand(self._waiting[key], num_open[key]) for key in keys}
        return Demands(seen=self._states.number, models=found)
