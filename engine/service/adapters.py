"""What the names of adapters stand for at this engine, as adapters are added and removed.

A name stands for one version: the digest of the files that were read. The core knows adapters by versions
alone, so keys and values that one has computed are found by no other. Of two changes of a name the greater
order holds (`AdapterInfo`), in whatever order they arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

import msgspec

from contract.engines import AdapterInfo
from contract.errors import MillraceError, Reason, invalid
from engine.adapters.version import AdapterError, version_of
from engine.config import AdaptersConfig
from engine.core import messages
from runtime.config import problem_with_adapter_name
from runtime.errors import ConfigError

# A version is kept for so long after it was checked or replaced, in seconds: requests for it may be on their
# way.
_KEPT_S = 10.0


class ServedAdapters:
    """Names to versions, and versions to folders. Lives on the event loop."""

    def __init__(
        self,
        config: AdaptersConfig,
        send: Callable[[messages.Command], None],
        on_change: Callable[[], None],
        read_version: Callable[[str], str] = version_of,
    ) -> None:
        """Reads the files of the adapters that are configured; raises ConfigError. `read_version` gives the
        version of a folder, or raises AdapterError.
        """
        self._send = send
        self._on_change = on_change
        self._read_version = read_version
        self._names: dict[str, AdapterInfo] = {}
        for name, path in config.paths.items():
            try:
                self._names[name] = AdapterInfo(name, path, read_version(path))
            except AdapterError as error:
                raise ConfigError(f"engine.adapters.paths.{name}: {error}") from error
        # Folders by the versions that the core knows.
        self._folders = {each.version: each.path for each in self._names.values()}
        # For the core, which has as many slots as names ask for.
        self.config = msgspec.structs.replace(config, paths=dict(self._folders), slots=config.num_slots)
        self._loaded: frozenset[str] = frozenset()
        self._answers: dict[int, asyncio.Future[str]] = {}
        self._next_token = 1

    @property
    def known(self) -> list[AdapterInfo]:
        """What every name stands for, removed ones included."""
        replace = msgspec.structs.replace
        return [replace(each, loaded=each.version in self._loaded) for _, each in sorted(self._names.items())]

    @property
    def served(self) -> list[AdapterInfo]:
        """Those of them that requests may ask for."""
        return [each for each in self.known if each.version]

    def version(self, name: str, version: str) -> str:
        """What the core knows an adapter by: the version that is asked for, else the one that the name stands
        for. Raises MODEL_NOT_FOUND with what is served.
        """
        found = version if version in self._folders else "" if version else self._version_of(name)
        if not found:
            known = ", ".join(each.name for each in self.served) or "none"
            asked = f" in version {version[:12]}" if version and self._version_of(name) else ""
            raise MillraceError(
                Reason.MODEL_NOT_FOUND,
                f"adapter {name[:80]!r} is not served{asked}; this engine serves {known}; ask for one of "
                "them, or have it added ([engine.adapters.paths], AddAdapter)",
                field="adapter",
            )
        return found

    def _version_of(self, name: str) -> str:
        known = self._names.get(name)
        return "" if known is None else known.version

    async def check(self, path: str) -> str:
        """The version of the adapter in a folder that can be served. Raises INVALID_ARGUMENT."""
        if not path:
            raise invalid("path", "it is empty; give the folder that PEFT saved, as the engine sees it")
        version = await self._read(path)
        token, self._next_token = self._next_token, self._next_token + 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._answers[token] = answer
        self._send(messages.AddAdapter(token, version, path))
        if problem := await answer:
            raise invalid("path", problem)
        self._folders[version] = path
        self._forget_later(version)
        if await self._read(path) != version:
            raise invalid(
                "path", f"{path} changed while it was read; add the adapter when its files are whole"
            )
        return version

    async def _read(self, path: str) -> str:
        try:
            return await asyncio.to_thread(self._read_version, path)
        except AdapterError as error:
            raise invalid("path", str(error)) from error

    async def add(self, name: str, path: str, version: str = "", generation: int = 0) -> None:
        """Lets a name stand for the adapter in a folder, which must have that version unless it is "". Raises
        INVALID_ARGUMENT.
        """
        if problem := problem_with_adapter_name(name):
            raise invalid("name", problem)
        if not version or self._folders.get(version) != path:
            found = await self.check(path)
            if version not in ("", found):
                raise invalid("path", f"{path} has changed since the adapter was added; add it again")
            version = found
        self._put(AdapterInfo(name, path, version, generation))

    def remove(self, name: str, generation: int = 0) -> None:
        """Lets a name stand for nothing. Raises MODEL_NOT_FOUND where it does and no generation is given."""
        if not generation:
            self.version(name, "")
        self._put(AdapterInfo(name, generation=generation))

    def _put(self, new: AdapterInfo) -> None:
        former = self._names.get(new.name)
        if not new.generation:
            newest = 0 if former is None else former.generation
            new = msgspec.structs.replace(new, generation=max(time.time_ns(), newest + 1))
        if former is not None and new.order <= former.order:
            return
        self._names[new.name] = new
        if former is not None and former.version:
            self._forget_later(former.version)
        self._on_change()

    def _forget_later(self, version: str) -> None:
        asyncio.get_running_loop().call_later(_KEPT_S, self._forget, version)

    def _forget(self, version: str) -> None:
        """The core need not know a version any more, if no name stands for it."""
        if self._answers:
            # What is being added may be this one.
            self._forget_later(version)
            return
        stands = any(each.version == version for each in self._names.values())
        if not stands and self._folders.pop(version, None) is not None:
            self._send(messages.DropAdapter(version))

    def answered(self, added: messages.AdapterAdded) -> None:
        """The core has looked at one that is to be added."""
        answer = self._answers.pop(added.token, None)
        if answer is not None and not answer.done():
            answer.set_result(added.problem)

    def are_loaded(self, versions: Collection[str]) -> None:
        """These are in memory now."""
        self._loaded = frozenset(versions)
        self._on_change()

    def core_lost(self, error: Exception) -> None:
        """Nobody will answer any more."""
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
        self._answers.clear()
