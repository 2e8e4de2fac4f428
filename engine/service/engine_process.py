"""The engine as one thing: core process, dispatcher, readiness, drain and loss."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
from millrace.engine.v1 import engine_pb2

from checkpoint.vocabulary import checkpoint_fingerprint
from contract.errors import MillraceError, Reason, RequestFailure
from engine.adapters.version import AdapterError, version_of
from engine.config import EngineConfig
from engine.core import messages
from engine.service import convert
from engine.service.adapters import ServedAdapters
from engine.service.core_client import CoreClient
from engine.service.dispatcher import Dispatcher
from engine.service.hand_over import HandOver
from engine.service.metrics import EngineMetrics
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.config import HealthConfig, ModelConfig
from runtime.deferred import Deferred
from runtime.errors import ConfigError

_log = logging.getLogger(__name__)

# How long the last messages may take to leave the process, in seconds.
_FLUSH_S = 2.0


class EngineProcess:
    """Owns the core client and the dispatcher. `lost` is set when the engine cannot serve any more."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        telemetry: Telemetry,
        core_client: Callable[..., CoreClient] = CoreClient,
        health: HealthConfig | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self._health = health or HealthConfig()
        self.engine_id = f"{socket.gethostname()}-{os.getpid()}"
        version = _pretended_version if config.simulated else version_of
        self.adapters = ServedAdapters(config.adapters, self._send, self._report_adapters, version)
        inside = msgspec.structs.replace(config, adapters=self.adapters.config)
        self.core = core_client(messages.Start(inside, model), log_level=telemetry.config.log_level)
        self.core.on_report = self._apply_report
        # Spans and counters of steps.
        self._deferred = Deferred()
        self.dispatcher = Dispatcher(self.core.send, telemetry, self.engine_id, self._deferred)
        # None where engines hand nothing over.
        self.hand_over = None if config.role == "both" else HandOver(config.hand_over, self._send)
        self.metrics = EngineMetrics(Metrics(max_label_values=telemetry.config.max_tenant_labels))
        self.lost = asyncio.Event()
        self._ready: asyncio.Future[messages.Ready] = asyncio.get_running_loop().create_future()
        self._checks: dict[int, asyncio.Future[messages.Checked]] = {}
        self._next_check = 1
        self._broken_cause = ""
        # Steps whose metrics are due, with the tiers of the requests that each names.
        self._uncounted: list[tuple[messages.StepDone, dict[int, str]]] = []
        self._fingerprint = self._find_fingerprint()
        self._listener: asyncio.Task[None] | None = None
        self._beating: asyncio.Task[None] | None = None

    def _send(self, command: messages.Command) -> None:
        self.core.send(command)

    def _find_fingerprint(self) -> str:
        """Of the checkpoint's vocabulary; empty when a simulated engine has none and accepts any."""
        if self.config.simulated and not Path(self.model.path).exists():
            return ""
        try:
            return checkpoint_fingerprint(self.model.path)
        except ConfigError:
            if self.config.simulated:
                return ""
            raise

    async def start(self) -> None:
        """Starts the core and returns when it is ready; raises ConfigError when it cannot be."""
        await self.core.start()
        if self.hand_over is not None and self.core.for_blocks is not None:
            await self.hand_over.start(self.core.for_blocks)
        self._listener = asyncio.create_task(self._listen())
        await self._ready
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Gateways hear that this process runs, also in the middle of a long step."""
        while True:
            await asyncio.sleep(self._health.beat_s)
            self.dispatcher.beat(self._health.beat_s / 2)

    async def stop(self) -> None:
        """Ends the core."""
        if self._beating is not None:
            self._beating.cancel()
        if self.hand_over is not None:
            await self.hand_over.stop()
        await self.core.stop()
        if self._listener is not None:
            await self._listener
        self._deferred.flush()

    def info(self, *, accept_fingerprint: str) -> engine_pb2.EngineInfo:
        """What is served; raises VOCABULARY_MISMATCH when a gateway decodes with another vocabulary."""
        ready = self._require_ready()
        fingerprint = self._fingerprint or accept_fingerprint
        if accept_fingerprint and accept_fingerprint != fingerprint:
            raise MillraceError(
                Reason.VOCABULARY_MISMATCH,
                f"the gateway decodes with vocabulary {accept_fingerprint}, this engine's is "
                f"{fingerprint}; point [model] path of all services at the same checkpoint",
                field="hello.vocabulary_fingerprint",
                metadata={"gateway": accept_fingerprint, "engine": fingerprint},
            )
        return convert.to_info(
            ready.memory,
            ready.facts,
            self.config,
            engine_id=self.engine_id,
            model=self.model.served_name,
            revision=self.model.served_revision,
            fingerprint=fingerprint,
            adapters=tuple(each.name for each in self.adapters.served),
            unsupported_options=self.core.unsupported_options,
        )

    def expected(self) -> dict[str, str]:
        """What the first steps showed, for the line that says that the engine is ready."""
        ready = self._require_ready()
        speed = ready.speed
        if not speed.prompt_tokens_per_s:
            return {}
        return {
            "kernels": ready.facts.level or ready.facts.attention_backend,
            "quantize": self.config.quantize,
            "alone": f"{speed.tokens_per_s_alone:.0f}",
            "together": f"{speed.tokens_per_s_together:.0f}",
            "streams": str(speed.num_together),
            "prompt": f"{speed.prompt_tokens_per_s:.0f}",
        }

    def limits(self) -> convert.ModelLimits:
        """What submissions are checked against."""
        ready = self._require_ready()
        return convert.ModelLimits(
            facts=ready.facts,
            max_tokens_total=min(ready.memory.max_model_len, ready.memory.capacity_tokens),
            simulated=self.config.simulated,
            adapters=self.adapters,
            role=self.config.role,
        )

    def _report_adapters(self) -> None:
        self.dispatcher.report_adapters(convert.to_adapters(self.adapters.known))
        if self._ready.done() and self.config.adapters.num_slots:
            loaded = tuple(each.name for each in self.adapters.served if each.loaded)
            self.metrics.adapters(self.config.adapters.num_slots, loaded)

    def refuse_if_draining(self) -> None:
        """Raises DRAINING when new requests are not taken any more."""
        if self.dispatcher.draining:
            raise MillraceError(
                Reason.DRAINING, "this engine is draining; send the request to another one", retry_after_s=1.0
            )

    async def check(self) -> messages.Checked:
        """The state of the core's books between two steps."""
        self._require_ready()
        token, self._next_check = self._next_check, self._next_check + 1
        answer: asyncio.Future[messages.Checked] = asyncio.get_running_loop().create_future()
        self._checks[token] = answer
        self.core.send(messages.Check(token))
        return await answer

    async def drain(self, limit_s: float | None) -> int:
        """Refuses new requests and waits for the running ones, up to `limit_s` seconds; those left then end
        with an error. Returns how many ended during the drain.
        """
        self.dispatcher.draining = True
        num_open = len(self.dispatcher.requests)
        try:
            await asyncio.wait_for(self.dispatcher.idle.wait(), limit_s)
        except TimeoutError:
            self.dispatcher.fail_rest(
                RequestFailure(
                    reason=Reason.DRAINING.value,
                    message=f"the engine stopped and the request did not end within {limit_s:g} s; retry",
                    retry_after_s=1.0,
                )
            )
            await self.dispatcher.idle.wait()
        await self.flush()
        return num_open

    async def flush(self) -> None:
        """Waits a moment for the gateways to take what is in their outboxes."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _FLUSH_S
        while loop.time() < give_up and not all(each.is_flushed for each in self.dispatcher.streams):
            await asyncio.sleep(0.01)

    def _require_ready(self) -> messages.Ready:
        if not self._ready.done() or self.lost.is_set():
            raise MillraceError(
                Reason.ENGINE_UNAVAILABLE, "the engine is not ready; its health says when", retry_after_s=1.0
            )
        return self._ready.result()

    def _apply_report(self, report: messages.Report) -> None:
        match report:
            case messages.StepDone():
                tiers = self.dispatcher.step_done(report)
                # Tokens do not wait for what is counted of them.
                if not self._uncounted:
                    self._deferred.call(self._count)
                self._uncounted.append((report, tiers))
            case messages.Checked():
                answer = self._checks.pop(report.token, None)
                if answer is not None and not answer.done():
                    answer.set_result(report)
            case messages.AdapterAdded():
                self.adapters.answered(report)
            case messages.AdaptersLoaded(names):
                self.adapters.are_loaded(names)
            case messages.LoadProgress(stage, fraction):
                _log.info("loading", extra={"stage": stage, "fraction": round(fraction, 3)})
            case messages.Ready():
                self.metrics.ready(report, self.model.served_name, self.core.pid)
                limit_s = self._health.silence_limit_s + self._pretended_step_s()
                self.core.watch(limit_s, self._health.step_limit_s)
                self._ready.set_result(report)
            case messages.CoreRefused(message):
                self._ready.set_exception(ConfigError(message))
            case messages.Broken(cause):
                self._broken_cause = cause

    def _pretended_step_s(self) -> float:
        """Longest step of a simulated engine, which only waits while it pretends to compute."""
        if not self.config.simulated:
            return 0.0
        simulation, num_tokens = self.config.simulation, self.config.scheduler.max_num_batched_tokens
        per_token_s = 1 / simulation.tokens_per_s if simulation.tokens_per_s else 0.0
        return simulation.step_ms / 1000 + num_tokens * per_token_s

    def _count(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        self.metrics.steps_done(uncounted)

    async def _listen(self) -> None:
        try:
            await self.core.listen()
        finally:
            self._core_ended()

    def _core_ended(self) -> None:
        cause = self._broken_cause or self.core.end_cause or "unknown"
        if not self._ready.done():
            self._ready.set_exception(CoreDied(f"the core process ended during start-up ({cause})"))
        error = MillraceError(
            Reason.ENGINE_LOST,
            f"the engine's core process ended ({cause}); another engine, or this one after its restart, "
            "can continue the request",
            retry_after_s=1.0,
        )
        self.dispatcher.core_lost(RequestFailure.of(error))
        for stream in list(self.dispatcher.streams):
            stream.end(error)
        for answer in self._checks.values():
            if not answer.done():
                answer.set_exception(error)
        self._checks.clear()
        self.adapters.core_lost(error)
        self.lost.set()


def _pretended_version(folder: str) -> str:
    """Of an adapter that is simulated, whose folder there need not be."""
    try:
        return version_of(folder)
    except AdapterError:
        return blake2b(folder.encode(), digest_size=16).hexdigest()


class CoreDied(Exception):
    """The core ended before it was ready, and not because of the configuration."""
