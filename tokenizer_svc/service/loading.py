"""One checkpoint made ready: vocabulary, templates, caches, and processes that compile its grammars."""

from __future__ import annotations

import asyncio

from millrace.tokenizer.v1 import tokenizer_pb2

from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.config import ModelConfig
from tokenizer_svc.config import ServiceConfig
from tokenizer_svc.grammar.request import WorkerSetup
from tokenizer_svc.messages.wire import vocabulary_response
from tokenizer_svc.service.compiler import GrammarCompiler
from tokenizer_svc.service.prepare import Preparer
from tokenizer_svc.service.shelf import Served
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint, locate
from tokenizer_svc.text.ends import with_implied_end
from tokenizer_svc.workers.pool import WorkerPool


class Loader:
    """Loads checkpoints while others are served."""

    def __init__(self, config: ServiceConfig, telemetry: Telemetry, metrics: Metrics) -> None:
        self._config = config
        self._telemetry = telemetry
        self._metrics = metrics

    async def __call__(self, model: ModelConfig) -> Served:
        """Its processes are not started yet. Raises ConfigError naming what of the checkpoint is at fault."""
        checkpoint, vocabulary = await asyncio.to_thread(self._read, model)
        config, settings = self._config, self._config.tokenizer
        setup = WorkerSetup(
            checkpoint=checkpoint,
            limits=settings.limits,
            memory_limit_bytes=settings.compile.memory_limit_bytes,
        )
        pool = WorkerPool(settings.compile, setup, silence_limit_s=config.health.silence_limit_s)
        compiler = GrammarCompiler(
            pool,
            fingerprint=checkpoint.vocabulary.fingerprint,
            cache_bytes=settings.compile.cache_bytes,
            shared=settings.compile.shared,
        )
        preparer = Preparer(
            checkpoint,
            compiler,
            self._telemetry,
            self._metrics,
            limits=settings.limits,
            turn_cache_tokens=settings.turn_cache_tokens,
        )
        return Served(model, preparer, vocabulary, pool)

    def _read(self, model: ModelConfig) -> tuple[Checkpoint, tokenizer_pb2.GetVocabularyResponse]:
        settings = self._config.tokenizer
        checkpoint = load_checkpoint(locate(model, simulated=settings.simulated), model)
        checkpoint = with_implied_end(checkpoint, settings.limits)
        return checkpoint, vocabulary_response(checkpoint)
