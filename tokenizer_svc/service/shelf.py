"""The checkpoints that are served, by every name that they are asked for under; they come and go meanwhile.

Each has a vocabulary, caches and worker processes of its own: what happens to one is no matter of the others.
One that cannot be loaded is refused by its name, with the reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from runtime.models import Models
from tokenizer_svc.service.prepare import Preparer
from tokenizer_svc.workers.pool import WorkerPool

_log = logging.getLogger(__name__)

# A checkpoint that is served no more is kept for as long as answers under way may ask for it, in seconds.
_KEPT_S = 600.0
_RETRY_S = 1.0


class Served(msgspec.Struct, frozen=True, eq=False):
    """One checkpoint."""

    model: ModelConfig
    preparer: Preparer
    # The answer to GetVocabulary.
    vocabulary: tokenizer_pb2.GetVocabularyResponse
    pool: WorkerPool

    @property
    def fingerprint(self) -> str:
        """Hash of its vocabulary."""
        return self.vocabulary.fingerprint

    async def close(self) -> None:
        """Ends its threads and processes."""
        self.preparer.close()
        await self.pool.close()


class Shelf:
    """Finds a checkpoint by a name. `load` starts a checkpoint and raises ConfigError where it cannot."""

    def __init__(self, load: Callable[[ModelConfig], Awaitable[Served]]) -> None:
        self._load = load
        self._models: Mapping[str, ModelConfig] = {}
        # By version (`ModelConfig.key`): those that are served, and those that were.
        self._loaded: dict[str, Served] = {}
        self._by_name: dict[str, Served] = {}
        # Why a version cannot be served.
        self._failures: dict[str, str] = {}
        self._leaving: dict[str, asyncio.TimerHandle] = {}
        self._retrying: asyncio.Task[None] | None = None
        self._has_workers = False

    @property
    def num_waiting(self) -> int:
        """Compilations that wait for a worker."""
        return sum(each.pool.num_waiting for each in self._loaded.values())

    async def start(self, models: Models) -> None:
        """Loads them all; raises ConfigError when none of them can be."""
        await self.apply(models)
        if not self._by_name:
            raise ConfigError(next(iter(self._failures.values())))

    async def start_workers(self) -> None:
        """Starts the processes of all; what came before waits for them. Those that are loaded later have
        theirs at once.
        """
        self._has_workers = True
        for each in list(self._loaded.values()):
            await each.pool.start()

    async def apply(self, models: Models) -> None:
        """Loads what is new; what is served no more is found by its version for a while."""
        self._models = models.models
        wanted = {model.key: model for model in models.models.values()}
        self._failures = {key: text for key, text in self._failures.items() if key in wanted}
        for key, model in wanted.items():
            leaving = self._leaving.pop(key, None)
            if leaving is not None:
                leaving.cancel()
            if key not in self._loaded:
                await self._try(model)
            elif self._loaded[key].model != model:
                old = self._loaded[key]
                self._loaded[key] = msgspec.structs.replace(old, model=model)
        loop = asyncio.get_running_loop()
        for key in self._loaded.keys() - wanted.keys() - self._leaving.keys():
            self._leaving[key] = loop.call_later(_KEPT_S, self._forget, key)
        self._name()
        if self._failures and self._retrying is None:
            self._retrying = asyncio.create_task(self._retry(), name="load checkpoints")

    def find(self, name: str) -> Served:
        """The checkpoint with this name, alias or version; "" is the only one. Raises MODEL_NOT_FOUND, and
        TOKENIZER_UNAVAILABLE for one that could not be loaded.
        """
        found = self._by_name.get(name) or self._loaded.get(name)
        if found is not None:
            return found
        for model in self._models.values():
            if name in model.names:
                raise MillraceError(
                    Reason.TOKENIZER_UNAVAILABLE,
                    f"model {name!r} cannot be served: {self._failures.get(model.key, 'it is being loaded')}",
                    field="model",
                    retry_after_s=_RETRY_S,
                )
        known = ", ".join(map(repr, self._models))
        raise MillraceError(
            Reason.MODEL_NOT_FOUND, f"model {name!r} is not served; ask for {known}", field="model"
        )

    async def close(self) -> None:
        """Ends all worker processes."""
        if self._retrying is not None:
            self._retrying.cancel()
        for handle in self._leaving.values():
            handle.cancel()
        for each in self._loaded.values():
            await each.close()

    def _name(self) -> None:
        here = [self._loaded[model.key] for model in self._models.values() if model.key in self._loaded]
        self._by_name = {name: each for each in here for name in each.model.names}
        if len(self._models) == 1 and here:
            self._by_name[""] = here[0]

    async def _try(self, model: ModelConfig) -> None:
        try:
            loaded = await self._load(model)
            if self._has_workers:
                await loaded.pool.start()
            self._loaded[model.key] = loaded
            self._failures.pop(model.key, None)
        except ConfigError as error:
            if self._failures.get(model.key) != str(error):
                _log.error("model %s is not served: %s", model.served_name, error)
            self._failures[model.key] = str(error)

    async def _retry(self) -> None:
        """Tries again, since a checkpoint may be copied to its path after the file names it."""
        while self._failures:
            await asyncio.sleep(_RETRY_S)
            for model in list(self._models.values()):
                if model.key in self._failures:
                    await self._try(model)
            self._name()
        self._retrying = None

    def _forget(self, key: str) -> None:
        self._leaving.pop(key, None)
        gone = self._loaded.pop(key, None)
        if gone is not None:
            closing = asyncio.create_task(gone.close(), name=f"close {key}")
            closing.add_done_callback(_note_failure)


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a checkpoint's workers did not end: %s", error)
