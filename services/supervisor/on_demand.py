"""Loads models when gateways ask for them, and unloads what nobody uses, or what makes room for others."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from runtime.config import ModelConfig
from runtime.loads import LINE_BYTES, Demands, LoadState, LoadStates, ModelDemand, line
from services.supervisor.kept_files import KeptFiles
from services.supervisor.ports import release
from services.supervisor.process import ProcessSpec
from services.supervisor.residence import Move, Resident, next_moves
from services.supervisor.stack import Stack, StartFailed

# How often it is looked at what is asked for, and loads are told how far they are, in seconds.
_LOOK_S = 0.1
# A load that fails is begun again so often before those who wait hear of it; a configuration is not.
_NUM_TRIES = 3
_CONFIG_EXIT = 2
# After a failure, nothing is loaded for so long.
_RETRY_S = 2.0
# What a load takes, where none has been seen.
_USUAL_LOAD_S = 10.0


class Plans(Protocol):
    """What models take in memory (services.supervisor.memory.MemoryPlans)."""

    @property
    def budget_bytes(self) -> int:
        """What all together may take; 0 is no limit."""
        ...

    def bytes_of(self, model: ModelConfig) -> int:
        """What one takes; raises ConfigError."""
        ...


class _ModelOnDemand:
    """One model with what runs for it."""

    def __init__(self, config: ModelConfig, resident: Resident) -> None:
        self.config = config
        self.resident = resident
        self.engines: list[str] = []
        self.num_failures = 0
        self.why = ""
        self.began_s = 0.0
        self.took_s = _USUAL_LOAD_S


class _AskingGateway:
    """A gateway."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.demands = Demands(seen=0)


class OnDemand:
    """Speaks with gateways at `address`, and starts and ends engines. `run` until cancelled."""

    def __init__(
        self,
        stack: Stack,
        address: Path,
        *,
        plans: Plans,
        max_loaded: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`plans` says what models take; no more than `max_loaded` of them are in memory, 0 is no limit."""
        self._stack = stack
        self._address = address
        self._plans = plans
        self._max_loaded = max_loaded
        self._clock = clock
        self._models: dict[str, _ModelOnDemand] = {}
        self._connections: set[_AskingGateway] = set()
        self._moving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._number = 0
        self._told: Mapping[str, LoadState] = {}
        self._files = KeptFiles()

    def replace(self, models: Iterable[ModelConfig]) -> None:
        """The models that are served now; engines of those that went end when nobody uses them."""
        wanted = {each.key: each for each in models if each.is_on_demand}
        for key, config in wanted.items():
            if key in self._models:
                self._models[key].config = config
                self._models[key].resident.idle_unload_s = config.idle_unload_s
                self._models[key].resident.is_leaving = False
                continue
            resident = Resident(
                key=key, num_bytes=self._plans.bytes_of(config), idle_unload_s=config.idle_unload_s
            )
            self._models[key] = _ModelOnDemand(config, resident)
        for key, model in list(self._models.items()):
            if key not in wanted:
                model.resident.is_leaving = True
                if model.resident.state == "unloaded":
                    del self._models[key]
        self._changed.set()

    async def run(self) -> None:
        """Serves gateways."""
        server = await asyncio.start_unix_server(self._serve, self._address, limit=LINE_BYTES)
        self._address.chmod(0o600)
        try:
            while True:
                self._look()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._changed.wait()
        finally:
            for task in self._moving:
                task.cancel()
            await asyncio.gather(*self._moving, return_exceptions=True)
            server.close()
            for each in self._connections:
                each.writer.close()
            self._files.close()
            self._address.unlink(missing_ok=True)

    # --- gateways ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = _AskingGateway(writer)
        self._connections.add(connection)
        writer.write(line(LoadStates(number=self._number, models=dict(self._told))))
        try:
            while text := await reader.readline():
                connection.demands = msgspec.json.decode(text, type=Demands)
                self._changed.set()
        except (OSError, ValueError, msgspec.DecodeError):
            return
        finally:
            self._connections.discard(connection)
            self._changed.set()
            writer.close()

    def _demand(self, key: str) -> ModelDemand:
        found = [each.demands.models.get(key, ModelDemand()) for each in self._connections]
        return ModelDemand(sum(each.num_waiting for each in found), sum(each.num_open for each in found))

    def _tell(self) -> None:
        states = {key: self._state_of(model) for key, model in self._models.items()}
        if states == self._told:
            return
        self._number += 1
        self._told = states
        message = line(LoadStates(number=self._number, models=states))
        for each in self._connections:
            each.writer.write(message)

    def _state_of(self, model: _ModelOnDemand) -> LoadState:
        resident, stage, fraction, left_s = model.resident, "", 0.0, 0.0
        if resident.state == "loading":
            stages = [self._stack.loading_stage(name) for name in model.engines]
            stage, fraction = min(stages, key=lambda each: each[1], default=("", 0.0))
            left_s = float(round(max(1.0, model.took_s - (self._clock() - model.began_s))))
        return LoadState(
            state=resident.state,
            stage=stage,
            fraction=round(fraction, 2),
            left_s=left_s,
            num_failures=model.num_failures,
            why=model.why,
        )

    # --- what is in memory ---

    def _look(self) -> None:
        now = self._clock()
        for key, model in self._models.items():
            demand = self._demand(key)
            model.resident.asked(demand.num_waiting, demand.num_open, now)
        residents = [model.resident for model in self._models.values()]
        moves = next_moves(
            residents, budget_bytes=self._plans.budget_bytes, max_loaded=self._max_loaded, now=now
        )
        for move in list(moves):
            self._begin(move)
        self._tell()

    def _begin(self, move: Move) -> None:
        model = self._models[move.resident.key]
        model.resident.state = "loading" if move.what == "load" else "unloading"
        moving = asyncio.create_task(self._load(model) if move.what == "load" else self._unload(model))
        self._moving.add(moving)
        moving.add_done_callback(self._moved)

    def _moved(self, task: asyncio.Task[None]) -> None:
        self._moving.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._stack.announce(f"a model could not be loaded or unloaded: {error!r}")

    async def _load(self, model: _ModelOnDemand) -> None:
        resident, config = model.resident, model.config
        model.began_s = self._clock()
        self._files.want(config.path)
        why = ""
        for _ in range(_NUM_TRIES):
            specs = self._stack.further_engines(config, max(1, config.engines))
            model.engines = [spec.name for spec in specs]
            try:
                await self._stack.add_engines(specs)
            except StartFailed as failure:
                self._forget(specs)
                why = str(failure)
                if failure.code == _CONFIG_EXIT:
                    break
                self._stack.announce(f"{config.served_name} could not be loaded: {why}")
                continue
            except BaseException:
                self._forget(specs)
                resident.state = "unloaded"
                raise
            self._stack.tell_engines()
            now = self._clock()
            resident.state, resident.loaded_s, resident.used_s = "loaded", now, now
            model.took_s = now - model.began_s
            self._stack.announce(f"{config.served_name} is loaded after {model.took_s:.1f} s")
            return
        model.engines = []
        # The last line says what to mend; the log has the rest.
        model.why = next((text for text in why.splitlines() if text), "it ended")
        model.num_failures += 1
        resident.state, resident.retry_s = "unloaded", self._clock() + _RETRY_S
        self._stack.announce(f"{config.served_name} cannot be loaded: {model.why}")

    def _forget(self, specs: Iterable[ProcessSpec]) -> None:
        for spec in specs:
            release(self._stack.layout.addresses.pop(spec.name, {}).values())

    async def _unload(self, model: _ModelOnDemand) -> None:
        """Ends the engines once every gateway knows that they are to go, and nobody has a request there."""
        self._tell()
        number, key = self._number, model.resident.key
        while any(each.demands.seen < number for each in self._connections) or self._demand(key).num_open:
            await asyncio.sleep(_LOOK_S)
        engines, model.engines = model.engines, []
        await self._stack.withdraw_engines(engines)
        model.resident.state = "unloaded"
        self._stack.announce(f"{model.config.served_name} is unloaded")
        if model.resident.is_leaving:
            self._models.pop(key, None)
