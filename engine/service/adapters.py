"""The adapters that are served, by the names that requests ask for, as they are added and removed.

Inside the engine an adapter goes by a name of its own, which no other files ever have: keys and values that
were computed with one adapter are not found by requests for the next of the same name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from contract.errors import MillraceError, Reason, invalid
from engine.config import AdaptersConfig
from engine.core import messages
from runtime.config import problem_with_adapter_name


class ServedAdapters:
    """Names to adapters. Lives on the event loop."""

    def __init__(
        self,
        config: AdaptersConfig,
        send: Callable[[messages.Command], None],
        on_change: Callable[[], None],
    ) -> None:
        self._send = send
        self._on_change = on_change
        self._paths = dict(config.paths)
        # What the core knows each by, and how many each name stood for.
        self._inside = {name: name for name in config.paths}
        self._versions = dict.fromkeys(config.paths, 1)
        self._loaded: frozenset[str] = frozenset()
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._next_token = 1

    @property
    def names(self) -> tuple[str, ...]:
        """Those that requests may ask for."""
        return tuple(sorted(self._inside))

    @property
    def loaded(self) -> tuple[str, ...]:
        """Those of them that are in memory."""
        return tuple(sorted(name for name, inside in self._inside.items() if inside in self._loaded))

    def path_of(self, name: str) -> str:
        """The folder of one that is served."""
        return self._paths[name]

    def inside(self, name: str) -> str:
        """What the core knows an adapter by; raises MODEL_NOT_FOUND with those that are served."""
        found = self._inside.get(name)
        if found is None:
            known = ", ".join(self.names) or "none"
            raise MillraceError(
                Reason.MODEL_NOT_FOUND,
                f"adapter {name[:80]!r} is not served; this engine serves {known}; ask for one of them, or "
                "have it added ([engine.adapters.paths], AddAdapter)",
                field="adapter",
            )
        return found

    async def add(self, name: str, path: str) -> None:
        """Serves the adapter in a folder under a name from now on. Raises INVALID_ARGUMENT."""
        problem = problem_with_adapter_name(name)
        if problem:
            raise invalid("name", problem)
        if not path:
            raise invalid("path", "it is empty; give the folder that PEFT saved, as the engine sees it")
        version = self._versions.get(name, 0) + 1
        self._versions[name] = version
        inside = name if version == 1 else f"{name}#{version}"
        token, self._next_token = self._next_token, self._next_token + 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[token] = answer
        self._send(messages.AddAdapter(token, inside, path))
        problem = await answer
        if problem:
            raise invalid("path", problem)
        former = self._inside.get(name)
        self._inside[name], self._paths[name] = inside, path
        if former is not None:
            self._send(messages.DropAdapter(former))
        self._on_change()

    def remove(self, name: str) -> None:
        """Takes no further requests for an adapter. Raises MODEL_NOT_FOUND."""
        self._send(messages.DropAdapter(self.inside(name)))
        del self._inside[name], self._paths[name]
        self._on_change()

    def answered(self, added: messages.AdapterAdded) -> None:
        """The core has looked at one that is to be added."""
        answer = self._answers.pop(added.token, None)
        if answer is not None and not answer.done():
            answer.set_result(added.problem)

    def are_loaded(self, inside: Collection[str]) -> None:
        """These are in memory now."""
        self._loaded = frozenset(inside)
        self._on_change()

    def core_lost(self, error: Exception) -> None:
        """Nobody will answer any more."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
