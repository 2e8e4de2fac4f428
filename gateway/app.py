"""Wires one gateway process: settings to parts, start to drain."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from functools import partial
from importlib import metadata

from contract.errors import MillraceError, Reason
from gateway.auth.callers import HttpCallers
from gateway.auth.verifier import CallerVerifier
from gateway.edge import Edge
from gateway.engines import discovery
from gateway.engines.fleet import Fleet
from gateway.grpc_face.large import add_to_server
from gateway.grpc_face.servicer import FULL_NAME, InferenceServicer
from gateway.grpc_face.unread import grpc_server
from gateway.http.app import build_app
from gateway.http.server import HttpServer
from gateway.pipeline.intake import Intake
from gateway.pipeline.outcome import OutcomeRecorder
from gateway.pipeline.pipeline import Pipeline
from gateway.settings import Settings
from gateway.tokenizer.client import TokenizerClient
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
# What it may take to tell every client that its stream ends here.
_FAREWELL_S = 2.0


class Gateway:
    """One process. `start`, `wait_ready`, serve until told otherwise, `drain`, `stop`."""

    def __init__(self, settings: Settings, telemetry: Telemetry, metrics: Metrics) -> None:
        self._settings = settings
        self._config = settings.gateway
        self._telemetry = telemetry
        self._metrics = metrics
        self._pipeline: Pipeline | None = None
        self._fleet: Fleet | None = None
        self._leaving = False
        self._lookup = discovery.lookup_of(self._config.discovery, self._config.engines)
        self._tokenizer = TokenizerClient(
            self._config.tokenizer, silence_limit_s=settings.health.silence_limit_s
        )
        self._edge = Edge(settings, telemetry, metrics)
        self._callers = CallerVerifier(settings.security, self._edge.tiers)
        self._recorder = OutcomeRecorder(metrics, telemetry, self._edge.ledger)
        self.grpc = grpc_server(self._config)
        http_callers = HttpCallers(self._edge.authorizer, self._callers)
        self._intake = Intake(self._config.request)
        self.http = HttpServer(
            build_app(
                self._current_pipeline,
                http_callers,
                self._edge.counter,
                self._edge.authorizer,
                metrics,
                self._edge.deferred,
                self.not_ready,
                self._edge.health,
            ),
            self._config.http_listen,
            max_body_bytes=self._config.max_body_bytes,
            callers=http_callers,
            intake=self._intake,
        )
        self._add_servicers()
        self._tasks: list[asyncio.Task[None]] = []

    def _add_servicers(self) -> None:
        register = partial(add_to_server, intake=self._intake)
        self.grpc.add(register, InferenceServicer(self._current_pipeline), FULL_NAME)
        self._edge.register(self.grpc)

    async def start(self) -> None:
        """Listens, and begins to look for the tokenizer service and engines. Health is NOT_SERVING."""
        version, model = metadata.version("millrace"), self._settings.model.served_name
        self._metrics.set(names.BUILD_INFO, 1, service=names.GATEWAY, version=version, model=model)
        self._metrics.set_function(names.ENGINES_UP, self._num_engines)
        await self._edge.start()
        await self.grpc.start()
        await self.http.start()
        self._tasks.append(asyncio.create_task(self._connect(), name="connect"))

    async def wait_ready(self) -> None:
        """Returns when the vocabulary is there and an engine is attached; raises what makes it impossible."""
        connect = self._tasks[0]
        while self.not_ready():
            if connect.done():
                connect.result()
            waiting = self._fleet
            if waiting is None:
                await asyncio.wait([connect], timeout=_DRAIN_POLL_S)
            else:
                await waiting.wait_change(1.0)
        self._tasks.append(asyncio.create_task(self._follow_readiness(), name="readiness"))

    def not_ready(self) -> str:
        """What is missing to serve; "" when nothing is."""
        if self._leaving:
            return "nothing: it is shutting down"
        if self._pipeline is None:
            return f"the vocabulary of the tokenizer service at {self._config.tokenizer}"
        if not self._pipeline.fleet.ready:
            return self._pipeline.fleet.unavailable().message
        return ""

    async def drain(self) -> None:
        """Says that it leaves, and takes requests until that is known; then refuses what is new and waits for
        what runs; tells clients whose time is up that it is.
        """
        self._leaving = True
        await self.grpc.set_serving(False)
        pipeline = self._pipeline
        if pipeline is None:
            return
        await asyncio.sleep(self._config.drain_notice_s)
        pipeline.draining = True
        limit_s = self._config.drain_limit_s
        if await _ended(pipeline, limit_s):
            return
        _log.warning("%d requests are cut off: the drain limit has passed", pipeline.num_open)
        pipeline.end_all(
            MillraceError(
                Reason.DRAINING,
                f"this gateway is shutting down and its drain limit of {limit_s:g} s has passed; "
                "send the request again",
                metadata={"drain_limit_s": f"{limit_s:g}"},
                retry_after_s=1.0,
            )
        )
        await _ended(pipeline, _FAREWELL_S)

    async def stop(self) -> None:
        """Ends everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.grpc.stop(0.5)
        await self.http.stop()
        if self._fleet is not None:
            await self._fleet.stop()
        await self._tokenizer.close()
        await self._edge.close()

    async def _connect(self) -> None:
        vocabulary = await self._tokenizer.wait_for_vocabulary(self._settings.model.served_name)
        fleet = Fleet(
            gateway=f"{socket.gethostname()}-{os.getpid()}",
            fingerprint=vocabulary.fingerprint,
            model=self._settings.model.path,
            served_model=self._settings.model.served_name,
            routing=self._config.routing,
            silence_limit_s=self._settings.health.silence_limit_s,
        )
        self._pipeline = Pipeline(
            model=self._settings.model,
            vocabulary=vocabulary,
            tokenizer=self._tokenizer,
            fleet=fleet,
            limiter=self._edge.limiter,
            tiers=self._edge.tiers,
            callers=self._callers,
            recorder=self._recorder,
            telemetry=self._telemetry,
            deferred=self._edge.deferred,
            intake=self._intake,
        )
        self._fleet = fleet
        await discovery.follow(self._lookup, fleet.set_targets, self._config.discovery_interval_s)

    async def _follow_readiness(self) -> None:
        assert self._fleet is not None, "readiness is followed once it was reached"
        serving = False
        while True:
            ready = not self.not_ready()
            if ready is not serving:
                await self.grpc.set_serving(ready)
                serving = ready
            await self._fleet.wait_change(1.0)

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return 0 if self._pipeline is None else self._pipeline.num_open

    @property
    def fleet(self) -> Fleet:
        """The engines; raises while there is no vocabulary to attach them with."""
        return self._current_pipeline().fleet

    def _current_pipeline(self) -> Pipeline:
        if self._pipeline is None:
            raise MillraceError(
                Reason.TOKENIZER_UNAVAILABLE,
                f"this gateway is starting and waits for {self.not_ready()}; try again",
                retry_after_s=1.0,
            )
        return self._pipeline

    def _num_engines(self) -> float:
        return 0.0 if self._fleet is None else float(len(self._fleet.ready))


async def _ended(pipeline: Pipeline, within_s: float) -> bool:
    """Waits for the open requests to end; whether they did in time."""
    end_s = time.monotonic() + within_s
    while pipeline.num_open and time.monotonic() < end_s:
        await asyncio.sleep(_DRAIN_POLL_S)
    return not pipeline.num_open
