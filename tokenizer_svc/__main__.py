"""`python -m tokenizer_svc`: starts the service."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop

from observability.emit import logging as json_logging
from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics, MetricsServer
from services import memory, tls
from services.config import load_section, read_tables
from services.deferred import Deferred
from services.errors import ConfigError
from services.server import GrpcServer, wait_for_signal
from tokenizer_svc.config import ServiceConfig, TokenizerConfig, load
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


async def _serve(config: ServiceConfig, observability: ObservabilityConfig) -> None:
    settings = config.tokenizer
    secret = b"" if settings.allow_unsigned else config.security.secret()
    tls.use(config.security)
    telemetry = tracing.setup("tokenizer", observability)
    metrics = Metrics(max_label_values=observability.max_tenant_labels)
    checkpoint = load_checkpoint(locate(config.model, simulated=settings.simulated))
    pool = WorkerPool(
        settings.compile,
        WorkerSetup(
            checkpoint=checkpoint,
            limits=settings.limits,
            memory_limit_bytes=settings.compile.memory_limit_bytes,
        ),
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
    )
    # Threads that handle texts give way to the event loop sooner than after Python's 5 ms.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # A vocabulary's tables among it.
    memory.settle()
    server = GrpcServer(settings.listen)
    server.add(add_to_server, servicer, SERVICE_NAME)
    await server.start()
    metrics_server = _serve_metrics(settings, metrics)
    try:
        await pool.start()
        await server.set_serving(True)
        ready = f"ready tokenizer grpc={settings.listen.rpartition(':')[0]}:{server.port}"
        if metrics_server is not None:
            ready += f" metrics={metrics_server.address}"
        print(ready, flush=True)
        await wait_for_signal()
        await server.stop(settings.drain_limit_s)
    finally:
        preparer.close()
        await pool.close()
        if metrics_server is not None:
            metrics_server.close()
        deferred.flush()
        telemetry.shutdown()


def _serve_metrics(settings: TokenizerConfig, metrics: Metrics) -> MetricsServer | None:
    if not settings.metrics_listen:
        return None
    try:
        return metrics.serve(settings.metrics_listen)
    except OSError as error:
        raise ConfigError(f"tokenizer.metrics_listen: {settings.metrics_listen}: {error}") from error


def main() -> int:
    """Runs until SIGTERM or SIGINT; 2 when the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tokenizer_svc", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="configuration file (TOML)")
    arguments = parser.parse_args()
    try:
        tables = read_tables(arguments.config)
        config = load(tables)
        observability = load_section(tables, "observability", ObservabilityConfig)
        json_logging.configure("tokenizer", observability.log_level)
        memory.keep_freed_memory(_KEPT_BYTES)
        uvloop.run(_serve(config, observability))
    except ConfigError as error:
        print(f"python -m tokenizer_svc: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
