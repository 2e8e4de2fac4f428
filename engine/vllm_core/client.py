"""The front's view of a core under vLLM's interpreter: the same messages, and the door before them."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from checkpoint.files import find
from checkpoint.pooling import read_pooling
from checkpoint.vocabulary import read_token_ids
from engine.core import messages
from engine.service.core_client import CoreClient
from engine.types import TokenEvent
from engine.vllm_core import launch
from engine.vllm_core.door import FrontDoor
from engine.vllm_core.options import REFUSED
from runtime.errors import ConfigError


class VllmClient(CoreClient):
    """See CoreClient. A request that is refused at the door ends here, and the core never hears of it."""

    unsupported_options = REFUSED

    def __init__(self, start: messages.Start, *, log_level: str = "info") -> None:
        checkpoint = find(start.model.path)
        ids, pooling = map(msgspec.to_builtins, (read_token_ids(checkpoint), read_pooling(checkpoint)))
        super().__init__(msgspec.structs.replace(start, token_ids=ids, pooling=pooling), log_level=log_level)
        self._config = start.config
        copies = start.config.vllm.data_parallel_size
        num_slots = start.config.scheduler.max_num_seqs * copies
        self._door = FrontDoor(msgspec.structs.replace(start.config.scheduler, max_num_seqs=num_slots))
        self._folder = tempfile.TemporaryDirectory(prefix="millrace-vllm-")
        launch.lay_out(Path(self._folder.name))
        self._last: messages.StepDone | None = None
        self._looking: set[asyncio.Task[None]] = set()

    def command(self, fd: int) -> tuple[tuple[str, ...], dict[str, str] | None]:
        """See CoreClient."""
        return (
            launch.command(self._config, fd, self.log_level),
            launch.variables(self._config, Path(self._folder.name)),
        )

    async def start(self) -> None:
        """See CoreClient."""
        for folder in self._config.adapters.paths.values():
            if problem := await asyncio.to_thread(_problem_with, folder):
                raise ConfigError(f"engine.adapters.paths: {problem}")
        await super().start()

    def send(self, command: messages.Command) -> None:
        """Queues a command; a submission passes the door first, and an adapter is looked at."""
        if isinstance(command, messages.AddAdapter):
            looking = asyncio.create_task(self._look_at(command), name="look at an adapter")
            self._looking.add(looking)
            looking.add_done_callback(self._looking.discard)
            return
        if isinstance(command, messages.Submit):
            failure = self._door.refusal(command.request, time.monotonic())
            if failure is not None:
                # The front opens the request after this call.
                event = TokenEvent.of_failure(command.request, failure)
                asyncio.get_running_loop().call_soon(self._answer, event)
                return
        super().send(command)

    async def _look_at(self, command: messages.AddAdapter) -> None:
        if problem := await asyncio.to_thread(_problem_with, command.folder):
            self.on_report(messages.AdapterAdded(command.token, problem))
        else:
            super().send(command)

    def _answer(self, event: TokenEvent) -> None:
        if self._last is not None:
            self.on_report(messages.StepDone(self._last.step_id, [event], (), self._last.load))

    def heard(self, report: messages.Report) -> None:
        """See CoreClient."""
        if isinstance(report, messages.StepDone):
            self._last = report
            self._door.passes(report, time.monotonic())
        elif isinstance(report, messages.Ready):
            self._door.opens(report.memory)
        super().heard(report)

    async def stop(self) -> None:
        """See CoreClient."""
        await super().stop()
        self._folder.cleanup()


def _problem_with(folder: str) -> str:
    """Why vLLM is not given an adapter; empty where it may decide."""
    # NumPy, which other fronts do without.
    from engine.adapters.peft import read_adapter

    try:
        read_adapter(Path(folder))
    except ConfigError as error:
        return str(error)
    return ""


def client_of(make: str) -> Callable[..., CoreClient]:
    """The core client of a make."""
    return {"millrace": CoreClient, "vllm": VllmClient}[make]
