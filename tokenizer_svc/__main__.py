"""`python -m tokenizer_svc`: starts the service."""

from __future__ import annotations

import sys
from typing import Any

from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from services import memory, tls
from services.deferred import Deferred
from services.main import run, say_ready
from services.server import GrpcServer, wait_for_signal
from tokenizer_svc.config import load
from tokenizer_svc.grammar.request import WorkerSetup
from tokenizer_svc.messages.wire import SERVICE_NAME, add_to_server
from tokenizer_svc.service.compiler import GrammarCompiler
from tokenizer_svc.service.prepare import Preparer
from tokenizer_svc.service.servicer import TokenizerServicer
from tokenizer_svc.text.checkpoint import load_checkpoint, locate
from tokenizer_svc.workers.pool import WorkerPool

_SWITCH_INTERVAL_S = 0.0005
# Messages of megabytes reuse the memory of those before: getting it from the kernel anew takes longer than
# copying them.
_KEPT_BYTES = 128 * 1024 * 1024


async def _serve(tables: dict[str, Any], observability: ObservabilityConfig) -> int:
    memory.keep_freed_memory(_KEPT_BYTES)
    config = load(tables)
    settings = config.tokenizer
    secret = b"" if settings.allow_unsigned else config.security.secret()
    tls.use(config.security)
    telemetry = tracing.setup(names.TOKENIZER, observability)
    metrics = Metrics(max_label_values=observability.max_tenant_labels)
    checkpoint = load_checkpoint(locate(config.model, simulated=settings.simulated), config.model)
    pool = WorkerPool(
        settings.compile,
        WorkerSetup(
            checkpoint=checkpoint,
            limits=settings.limits,
            memory_limit_bytes=settings.compile.memory_limit_bytes,
        ),
        silence_limit_s=config.health.silence_limit_s,
    )
    metrics.set_function(names.COMPILES_WAITING, lambda: pool.num_waiting)
    compiler = GrammarCompiler(
        pool,
        fingerprint=checkpoint.vocabulary.fingerprint,
        cache_bytes=settings.compile.cache_bytes,
        shared=settings.compile.shared,
    )
    preparer = Preparer(
        checkpoint,
        compiler,
        telemetry,
        metrics,
        limits=settings.limits,
        turn_cache_tokens=settings.turn_cache_tokens,
    )
    deferred = Deferred()
    servicer = TokenizerServicer(
        preparer,
        config.model,
        telemetry,
        deferred,
        secret=secret,
        max_context_age_s=config.security.max_context_age_s,
        allow_unsigned=settings.allow_unsigned,
        prepare_limit_s=settings.limits.max_prepare_s,
        beat_s=config.health.beat_s,
    )
    # Threads that handle texts give way to the event loop sooner than after Python's 5 ms.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # A vocabulary's tables among it.
    memory.settle()
    server = GrpcServer(settings.listen)
    server.add(add_to_server, servicer, SERVICE_NAME)
    await server.start()
    exposed = metrics.serve(settings.metrics_listen, "tokenizer.metrics_listen")
    try:
        await pool.start()
        await server.set_serving(True)
        say_ready("tokenizer", grpc=server.address, metrics=exposed)
        await wait_for_signal()
        await server.stop(settings.drain_limit_s)
    finally:
        preparer.close()
        await pool.close()
        metrics.close()
        deferred.flush()
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run("tokenizer_svc", names.TOKENIZER, __doc__, _serve))
