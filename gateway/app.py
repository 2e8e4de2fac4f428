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
from gateway.auth.authorizer import HttpCallers
from gateway.auth.verifier import CallerVerifier
from gateway.batches.service import Batches
from gateway.edge import Edge
from gateway.engines.fleet import Fleet, follow, lookup_of
from gateway.faces.anthropic import batches as message_batches
from gateway.faces.anthropic import routes as anthropic
from gateway.faces.error_forms import ERROR_FORMS
from gateway.faces.grpc.large import add_to_server
from gateway.faces.grpc.servicer import FULL_NAME, InferenceServicer
from gateway.faces.grpc.unread import grpc_server
from gateway.faces.openai import batches as openai_batches
from gateway.faces.openai import routes as openai
from gateway.faces.pooled import routes as pooled
from gateway.faces.responses import routes as responses
from gateway.http.application import build_app
from gateway.http.server import HttpServer
from gateway.intake.intake import Intake
from gateway.models.catalog import Catalog
from gateway.models.keeper import ModelKeeper
from gateway.models.loads import ModelLoads
from gateway.models.route_watch import RouteWatch
from gateway.pipeline.attempts import Attempts
from gateway.pipeline.books import Books
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.shadow import Shadows
from gateway.settings import Settings
from gateway.store.store import Store
from gateway.test_time.deliberations import Deliberations
from gateway.tokenizer.client import TokenizerClient
from gateway.types.error_form import ErrorForms
from gateway.ui import routes as ui
from gateway.ui.endpoints import AccountEndpoints
from observability.emit import names
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.models import source
from runtime.server import MODEL_HEALTH

_log = logging.getLogger(__name__)

_DRAIN_POLL_S = 0.05
# How long a gateway that can serve waits for engines of further models before it says so.
_ALL_MODELS_S = 10.0
# Longest time to send every client the end of its stream.
_FAREWELL_S = 2.0
# Time for engines to say what they have spent on requests that the end of this gateway has ended.
_LAST_WORDS_S = 0.5


class Gateway:
    """One process. `start`, `wait_ready`, serve, `drain`, `stop`."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        metrics: Metrics,
        error_forms: ErrorForms = ERROR_FORMS,
    ) -> None:
        self._settings = settings
        self._error_forms = error_forms
        self._config = settings.gateway
        self._telemetry = telemetry
        self._metrics = metrics
        self._leaving = False
        self._lookup = lookup_of(self._config.discovery, self._config.engines)
        self._intake = Intake(self._config.request)
        self._tokenizer = TokenizerClient(
            self._config.tokenizer,
            silence_limit_s=settings.health.silence_limit_s,
            pauses=self._intake.slices,
        )
        self._store = Store.open(self._config.store)
        self._edge = Edge(settings, telemetry, metrics, self._intake.refusals, error_forms)
        self._callers = CallerVerifier(settings.security, self._edge.tiers)
        self._catalog = Catalog(
            settings.models, self._edge.tiers, from_zero=self._config.autoscaling.from_zero
        )
        self._fleet = self._catalog.fleet = Fleet(
            gateway=f"{socket.gethostname()}-{os.getpid()}",
            fingerprint=self._catalog.fingerprint,
            check=self._catalog.check_engine,
            routing=self._config.routing,
            autoscaling=self._config.autoscaling,
            silence_limit_s=settings.health.silence_limit_s,
            on_change=self._catalog.promote,
            on_unclaimed=self._edge.note_unclaimed,
        )
        self._routes = RouteWatch(self._config, self._catalog, metrics)
        self._keeper = ModelKeeper(settings, self._catalog, self._tokenizer, self._edge.prices)
        self.grpc = grpc_server(self._config, self._intake.refusals)
        attempts = Attempts(
            fleet=self._fleet,
            tokenizer=self._tokenizer,
            limiter=self._edge.limiter,
            callers=self._callers,
            metrics=metrics,
            intake=self._intake,
            efforts=self._config.efforts,
            keeps_transcripts=telemetry.config.capture_content,
        )
        self._loads = ModelLoads(self._config.loader, self._fleet)
        self._shadows = Shadows(self._catalog, attempts, self._edge.prices, metrics, telemetry)
        self._pipeline = self._build_pipeline(attempts)
        self._batches = Batches.open(
            self._config.batches,
            self._current_pipeline,
            max_line_bytes=self._config.max_body_bytes,
            error_forms=error_forms,
            forms={
                openai_batches.API: openai_batches.OpenAiResults(),
                message_batches.API: message_batches.AnthropicResults(),
            },
            metrics=metrics,
        )
        self.http = self._build_http()
        self._add_servicers()
        self._tasks: list[asyncio.Task[None]] = []

    def _build_pipeline(self, attempts: Attempts) -> Pipeline:
        edge = self._edge
        books = Books(self._metrics, self._telemetry, edge.ledger, edge.deferred)
        books.expects(self._settings.models.models, edge.tiers.all.values())
        books.when_written = self._shadows.offer
        self._loads.running = books.running_by_model
        attempts.deliberates = deliberations = Deliberations(attempts, self._telemetry)
        pipeline = Pipeline(
            catalog=self._catalog,
            attempts=attempts,
            tiers=edge.tiers,
            books=books,
            loads=self._loads,
            shadows=self._shadows,
            telemetry=self._telemetry,
            deferred=edge.deferred,
        )
        deliberations.pipeline = pipeline
        return pipeline

    def _build_http(self) -> HttpServer:
        secret = self._settings.security.secret()
        served, self._background = responses.routes(self._current_pipeline, secret, self._store)
        edge, callers = self._edge, HttpCallers(self._edge.authorizer, self._callers)
        faces = [
            openai.routes(self._current_pipeline, self._config.admin_tenants),
            served,
            anthropic.routes(self._current_pipeline, secret),
            pooled.routes(self._current_pipeline),
            ui.routes(self._account()),
        ]
        if self._batches is not None:
            self._batches.endpoints = {
                path: face.exact["POST", path] for face in faces for path in face.batched
            }
            faces += [
                openai.batch_routes(self._current_pipeline, self._batches),
                anthropic.batch_routes(self._current_pipeline, self._batches),
            ]
        application = build_app(
            faces,
            callers,
            edge.counter,
            edge.authorizer,
            self._metrics,
            edge.deferred,
            self.not_ready,
            edge.limit_store_health,
        )
        return HttpServer(
            application,
            self._config.http_listen,
            max_body_bytes=self._config.max_body_bytes,
            error_forms=self._error_forms,
            callers=callers,
            intake=self._intake,
            sockets=application.sockets,
            socket_config=self._config.socket,
            metrics=self._metrics,
            uploads=application.uploads,
        )

    def _account(self) -> AccountEndpoints:
        return AccountEndpoints(
            self._current_pipeline,
            edge=self._edge,
            fleet=self._fleet,
            store=self._store,
            metrics=self._metrics,
            admin_tenants=self._config.admin_tenants,
        )

    def _add_servicers(self) -> None:
        register = partial(add_to_server, intake=self._intake)
        self.grpc.add(register, InferenceServicer(self._current_pipeline), FULL_NAME)
        self._edge.register(self.grpc)

    async def start(self) -> None:
        """Listens, and begins to look for the tokenizer service and engines. Health is NOT_SERVING."""
        version, models = metadata.version("millrace"), ",".join(self._settings.models.models)
        self._metrics.set(names.BUILD_INFO, 1, service=names.GATEWAY, version=version, model=models)
        self._metrics.set(names.CONFIGURATION_INFO, 1, sha256=source().sha256)
        self._metrics.set_function(names.ENGINES_UP, self._num_engines)
        await self._edge.start()
        if self._store is not None and self._background is not None:
            self._store.start()
            self._background.start()
        if self._batches is not None:
            self._batches.start()
        await self._routes.start()
        await self.grpc.start()
        await self.http.start()
        keeping = self._keeper.run(source(), self._fleet.note_change)
        self._tasks += [
            asyncio.create_task(keeping, name="keep models"),
            asyncio.create_task(self._connect(), name="connect"),
            asyncio.create_task(self._routes.run(), name="routes"),
            asyncio.create_task(self._loads.run(), name="models on demand"),
        ]

    async def wait_ready(self) -> None:
        """Returns when requests can be served: of every model that can be loaded, if its engines are near."""
        while self.not_ready():
            await self._fleet.wait_change(1.0)
        ends_s = time.monotonic() + _ALL_MODELS_S
        while not self._catalog.complete and (left_s := ends_s - time.monotonic()) > 0:
            await self._fleet.wait_change(left_s)
        self._tasks.append(asyncio.create_task(self._follow_readiness(), name="readiness"))

    def not_ready(self) -> str:
        """What is missing to serve; "" when nothing is."""
        if self._leaving:
            return "nothing: it is shutting down"
        if not self._catalog.served:
            return f"the vocabulary of the tokenizer service at {self._config.tokenizer}"
        return "" if self._catalog.ready else self._fleet.unavailable().message

    async def drain(self) -> None:
        """Says that it leaves, and takes requests until that is known; then refuses what is new and waits for
        what runs; ends the streams of clients whose time is up.
        """
        self._leaving = True
        await self.grpc.set_serving(False)
        pipeline = self._pipeline
        await asyncio.sleep(self._config.drain_notice_s)
        pipeline.draining = True
        self.http.retire_sockets()
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
        self._routes.close()
        await self._shadows.close()
        if self._background is not None:
            await self._background.close()
        if self._batches is not None:
            await self._batches.close()
        await self.grpc.stop(0.5)
        await self.http.stop()
        # Engines say what they have spent on requests that were ended just now, if they still can. After that
        # nothing is heard any more, and who waited writes what is known.
        await self._pipeline.books.hear_last_words(_LAST_WORDS_S)
        await self._fleet.stop()
        await self._pipeline.books.hear_last_words(_LAST_WORDS_S)
        await self._tokenizer.close()
        await self._edge.close()
        if self._store is not None:
            await self._store.close()

    async def _connect(self) -> None:
        while not self._catalog.served:
            # An engine that is asked before would have to be asked again.
            await self._fleet.wait_change(1.0)
        await follow(self._lookup, self._fleet.set_targets, self._config.discovery_interval_s)

    async def _follow_readiness(self) -> None:
        serving, reported = False, set[str]()
        while True:
            ready = not self.not_ready()
            if ready is not serving:
                await self.grpc.set_serving(ready)
                serving = ready
            askable = self._catalog.askable
            for key in reported ^ askable:
                await self.grpc.set_health(f"{MODEL_HEALTH}{key}", key in askable)
            reported = askable
            for (model, pool), num_engines in self._fleet.wanted_engines().items():
                self._metrics.set(names.ENGINES_WANTED, num_engines, model=model, pool=pool)
            await self._fleet.wait_change(1.0)

    @property
    def num_open(self) -> int:
        """Accepted requests that have not ended."""
        return self._pipeline.num_open

    @property
    def fleet(self) -> Fleet:
        """The engines."""
        return self._fleet

    def _current_pipeline(self) -> Pipeline:
        if not self._catalog.served:
            raise MillraceError(
                Reason.TOKENIZER_UNAVAILABLE,
                f"this gateway is starting and waits for {self.not_ready()}; try again",
                retry_after_s=1.0,
            )
        return self._pipeline

    def _num_engines(self) -> float:
        return float(len(self._fleet.ready))


async def _ended(pipeline: Pipeline, within_s: float) -> bool:
    """Waits for the open requests to end; whether they did in time."""
    end_s = time.monotonic() + within_s
    while pipeline.num_open and time.monotonic() < end_s:
        await asyncio.sleep(_DRAIN_POLL_S)
    return not pipeline.num_open
