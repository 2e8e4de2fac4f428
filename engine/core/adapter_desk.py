"""The core's part in adding, loading and removing adapters."""

from __future__ import annotations

from collections.abc import Callable

from engine.core import messages
from engine.runner.base import Adapters
from engine.scheduler import Scheduler


class AdapterDesk:
    """Lives in the loop's thread; what takes time is done in the runner's own."""

    def __init__(
        self, scheduler: Scheduler, adapters: Adapters, send: Callable[[messages.Report], None]
    ) -> None:
        self._scheduler = scheduler
        self._adapters = adapters
        self._send = send
        self._num_adding = 0
        # Nobody asks for them any more; those that have asked are served.
        self._leaving: set[str] = set()
        self._loaded: tuple[str, ...] = ()

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way that somebody waits for."""
        return bool(self._num_adding) or self._scheduler.is_loading

    def take(self, command: messages.AddAdapter | messages.DropAdapter) -> None:
        """Begins what the front asks for."""
        if isinstance(command, messages.AddAdapter):
            self._num_adding += 1
            self._adapters.add_later(command.token, command.name, command.folder)
        else:
            self._leaving.add(command.name)

    def publish(self) -> None:
        """Says what was added, and what is in memory when that has changed."""
        if self._num_adding:
            for token, problem in self._adapters.answers():
                self._num_adding -= 1
                self._send(messages.AdapterAdded(token, problem))
        if self._leaving:
            for name in self._leaving - self._scheduler.adapters_asked_for():
                self._adapters.drop(name)
                self._leaving.discard(name)
        loaded = self._scheduler.loaded_adapters
        if loaded != self._loaded:
            self._loaded = loaded
            self._send(messages.AdaptersLoaded(loaded))
