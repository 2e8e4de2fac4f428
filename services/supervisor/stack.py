"""The life of a stack: start together, watch and restart, drain in order."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Sequence
from itertools import count

import httpx

from runtime.config import ModelConfig
from services.supervisor.config import SupervisorConfig
from services.supervisor.edge import (
    render_configuration,
    stop_accepting,
    wait_for_no_requests,
    wait_forwarding,
)
from services.supervisor.health import wait_healthy, wait_hung
from services.supervisor.layout import Layout
from services.supervisor.models import write_engines
from services.supervisor.ports import release
from services.supervisor.process import ChildProcess, ProcessEnded, ProcessSpec, describe_code
from services.supervisor.report import StartReport
from services.supervisor.state import (
    FILE_NAME,
    ProcessState,
    RunState,
    own_create_time,
    remove_state,
    write_state,
)

# Exit status of a service whose configuration cannot be used.
_CONFIG_EXIT = 2
# With which such a service begins its line.
_PROGRAM = re.compile(r"^python -m [\w.]+: ")
_FAILED_EXIT = 1
# Bytes on their way to slow clients get this long after the last gateway has finished.
_FLUSH_LIMIT_S = 2.0
# Envoy asks its gateways for their health several times a second.
_FORWARD_LIMIT_S = 30.0
_LOADING_INTERVAL_S = 0.25
_STATE_RETRY_S = 1.0
_START_FAILURES = (ProcessEnded, TimeoutError, OSError)


class StartFailed(Exception):
    """The stack did not become healthy; everything that ran was stopped.

    `code` is the exit status for it: 2 when a service could not use its configuration, 1 otherwise.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class Stack:
    """Every process of one deployment. `announce` gets one line for everything worth telling."""

    def __init__(self, layout: Layout, announce: Callable[[str], None]) -> None:
        self.layout = layout
        self._tell = announce
        logs = layout.state_directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = logs
        self._children = {spec.name: self._child(spec) for spec in layout.processes}
        # Those that answer requests for models; they come and go with those.
        self.engines = {spec.name: spec for spec in layout.engines}
        # Engines that take nothing new, and whose addresses gateways are not told.
        self.unlisted: set[str] = set()
        self._numbers = count(len(self.engines))
        # Facts in the line that each process printed when it was ready.
        self.said: dict[str, dict[str, str]] = {}
        self._tenders: dict[str, asyncio.Task[None]] = {}
        # While the state file could not be written.
        self._state_retry: asyncio.TimerHandle | None = None

    @property
    def healthy(self) -> bool:
        """Whether the start is over and everything was ready."""
        return bool(self._tenders)

    @property
    def log_directory(self) -> str:
        """Where the processes log."""
        return str(self.layout.state_directory / "logs")

    async def start(self, report: StartReport) -> None:
        """Starts everything and waits until all of it is healthy; tells `report` how far it is.

        Raises StartFailed with the reason and the end of the log. Whoever started it kills what runs then.
        """
        self.layout.state_directory.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **self.layout.environment}
        rendered = await render_configuration(self.layout.config, environment)
        self.layout.envoy_config.write_bytes(rendered)
        watching = asyncio.create_task(self._watch_loading(report))
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._children.values():
                    group.create_task(self._start_one(child, report))
            await wait_forwarding(self.layout.edge_admin, _FORWARD_LIMIT_S)
        except* (ProcessEnded, TimeoutError, OSError) as failures:
            raise self._failed(failures.exceptions[0]) from failures
        finally:
            watching.cancel()
        self._write_state()
        for child in self._children.values():
            self._keep(child)

    def _child(self, spec: ProcessSpec) -> ChildProcess:
        log = self._logs / f"{spec.name}.log"
        log.write_bytes(b"")
        return ChildProcess(spec, log, {**self.layout.environment, **spec.environment})

    def _keep(self, child: ChildProcess) -> None:
        self._tenders[child.spec.name] = asyncio.create_task(self._tend(child))

    def further_engines(self, model: ModelConfig, num: int) -> list[ProcessSpec]:
        """What starts so many more engines of a model, under names of their own."""
        return [self.layout.plan_engine(next(self._numbers), model) for _ in range(num)]

    def loading_stage(self, name: str) -> tuple[str, float]:
        """What a process is loading, and how much of it is done; "" where it does not say."""
        child = self._children.get(name)
        return ("", 0.0) if child is None else child.loading_stage()

    def tell_engines(self) -> None:
        """Writes where the engines are, for gateways."""
        addresses = [spec.health for name, spec in self.engines.items() if name not in self.unlisted]
        write_engines(self.layout.state_directory, addresses)

    async def withdraw_engines(self, names: Sequence[str], notice_s: float = 0.0) -> None:
        """Has gateways send engines nothing new, gives that time to become known, and ends them."""
        self.unlisted.update(names)
        self.tell_engines()
        await asyncio.sleep(notice_s)
        await self.remove_engines(names)
        self.unlisted.difference_update(names)

    async def add_engines(self, specs: Sequence[ProcessSpec]) -> None:
        """Starts further engines and returns when all of them are healthy; else none of them runs, and the
        failure of the first is raised as a StartFailed.
        """
        children = {spec.name: self._child(spec) for spec in specs}
        self._children |= children
        try:
            for child in children.values():
                await child.start()
            for child in children.values():
                await wait_healthy(child, self.layout.settings.start_limit_s)
        except BaseException as failure:
            told = self._failed(failure) if isinstance(failure, _START_FAILURES) else failure
            for name, child in children.items():
                child.kill()
                del self._children[name]
            raise told from failure
        for name, child in children.items():
            self.engines[name] = child.spec
            self._keep(child)
        self._write_state()

    async def remove_engines(self, names: Sequence[str]) -> None:
        """Has engines finish what they have, and ends them."""
        children = [self._children[name] for name in names]
        for name in names:
            del self.engines[name]
            self._tenders.pop(name).cancel()
        await asyncio.gather(*(child.stop() for child in children))
        for name in names:
            del self._children[name]
            release(self.layout.addresses.pop(name, {}).values())
        self._write_state()

    async def _watch_loading(self, report: StartReport) -> None:
        while True:
            for name, child in self._children.items():
                report.loading(name, *child.loading_stage())
            await asyncio.sleep(_LOADING_INTERVAL_S)

    async def _start_one(self, child: ChildProcess, report: StartReport) -> None:
        await child.start()
        limit_s = self.layout.settings.start_limit_s
        try:
            self.said[child.spec.name] = await wait_healthy(child, limit_s)
        except TimeoutError as error:
            raise TimeoutError(
                f"{child.spec.name} was not ready after {limit_s:.0f} s (supervisor.start_limit_s)"
            ) from error
        report.ready(child.spec.name)

    def _failed(self, failure: BaseException) -> StartFailed:
        if isinstance(failure, BaseExceptionGroup):
            return self._failed(failure.exceptions[0])
        if not isinstance(failure, ProcessEnded):
            return StartFailed(str(failure), _FAILED_EXIT)
        child = self._children[failure.name]
        if failure.code == _CONFIG_EXIT:
            # The service's own line says it all; how it was started is no concern of the user.
            line = _PROGRAM.sub("", child.log_tail(1))
            return StartFailed(f"{failure.name}: {line}", _CONFIG_EXIT)
        return StartFailed(f"{failure}; the end of {child.log_path}:\n{child.log_tail()}", _FAILED_EXIT)

    # --- while it runs ---

    async def _tend(self, child: ChildProcess) -> None:
        """Starts a process again whenever it ends, more slowly at every failure in a row."""
        settings = self.layout.settings
        delay_s = settings.restart_delay_s
        while True:
            code = await self._end_of(child)
            # Its own children (an engine's core process) would keep ports and memory.
            child.kill()
            if child.age_s > settings.max_restart_delay_s:
                delay_s = settings.restart_delay_s
            self.announce(
                f"{child.spec.name} ended with {describe_code(code)}; starting it again in {delay_s:.1f} s "
                f"(log: {child.log_path})"
            )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, settings.max_restart_delay_s)
            await self._restart(child, settings)

    async def _end_of(self, child: ChildProcess) -> int:
        """The exit status of a process, once it has ended; one that hangs is killed."""
        watching = asyncio.create_task(self._kill_if_hung(child))
        try:
            return await child.wait()
        finally:
            watching.cancel()

    async def _kill_if_hung(self, child: ChildProcess) -> None:
        why = await wait_hung(child, self.layout.silence_limit_s)
        self.announce(f"{child.spec.name} hangs and is killed: {why}")
        child.kill()

    async def _restart(self, child: ChildProcess, settings: SupervisorConfig) -> None:
        try:
            await child.start()
            await wait_healthy(child, settings.start_limit_s)
        except (ProcessEnded, OSError):
            return
        except TimeoutError:
            self.announce(f"{child.spec.name} was not ready after {settings.start_limit_s:.0f} s")
            child.kill()
            return
        self._write_state()
        self.announce(f"{child.spec.name} is ready again after {child.age_s:.1f} s")

    def announce(self, line: str) -> None:
        # The disk that standard output goes to may be full.
        with contextlib.suppress(OSError):
            self._tell(line)

    def _write_state(self) -> None:
        layout = self.layout
        processes = tuple(
            ProcessState(name=name, pid=child.pid, addresses=dict(layout.addresses.get(name, {})))
            for name, child in self._children.items()
        )
        state = RunState(
            pid=os.getpid(),
            pid_created_unix_s=own_create_time(),
            address=layout.address,
            scheme=layout.scheme,
            api_key=layout.api_key,
            model=layout.model_name,
            trace_store=layout.trace_store,
            config="" if layout.config is None else str(layout.config.absolute()),
            environment=dict(layout.environment),
            processes=processes,
        )
        if self._state_retry is not None:
            self._state_retry.cancel()
        try:
            write_state(layout.state_directory, state)
            self._state_retry = None
        except OSError as error:
            if self._state_retry is None:
                self.announce(
                    f"{FILE_NAME} tells of processes that ended: {error}; tried again until it can be"
                )
            # The processes go on without it.
            self._state_retry = asyncio.get_running_loop().call_later(_STATE_RETRY_S, self._write_state)

    # --- the end ---

    async def stop(self) -> None:
        """Drains: no new connections, streams in flight finish, then all ends from the edge inwards."""
        self._leave_alone()
        await asyncio.gather(*self._tenders.values(), return_exceptions=True)
        layout = self.layout
        with contextlib.suppress(httpx.HTTPError):
            await stop_accepting(layout.edge_admin)
        await self._stop_all([spec.name for spec in layout.gateways])
        await wait_for_no_requests(layout.edge_admin, _FLUSH_LIMIT_S)
        await self._stop_all([layout.envoy.name])
        await self._stop_all([*self.engines, layout.tokenizer.name])
        if layout.collector is not None:
            await self._stop_all([layout.collector.name])
        remove_state(layout.state_directory)

    def _leave_alone(self) -> None:
        for each in (*self._tenders.values(), self._state_retry):
            if each is not None:
                each.cancel()

    async def _stop_all(self, names: list[str]) -> None:
        await asyncio.gather(*(self._children[name].stop() for name in names))

    async def kill(self) -> None:
        """Ends everything at once; returns when it is gone."""
        self._leave_alone()
        for child in self._children.values():
            child.kill()
        remove_state(self.layout.state_directory)
        await asyncio.gather(*(child.wait_killed() for child in self._children.values()))
