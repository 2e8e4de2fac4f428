"""`python -m tokenizer_svc`: starts the service."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from runtime import memory, tls
from runtime.deferred import Deferred
from runtime.main import run, say_ready
from runtime.models import load_models, source
from runtime.server import GrpcServer, wait_for_signal
from tokenizer_svc.config import load
from tokenizer_svc.messages.wire import SERVICE_NAME, add_to_server
from tokenizer_svc.service.loading import Loader
from tokenizer_svc.service.servicer import TokenizerServicer
from tokenizer_svc.service.shelf import Shelf

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
    shelf = Shelf(Loader(config, telemetry, metrics))
    metrics.set_function(names.COMPILES_WAITING, lambda: shelf.num_waiting)
    deferred = Deferred()
    servicer = TokenizerServicer(
        shelf,
        telemetry,
        deferred,
        secret=secret,
        max_context_age_s=config.security.max_context_age_s,
        allow_unsigned=settings.allow_unsigned,
        prepare_limit_s=settings.limits.max_prepare_s,
        beat_s=config.health.beat_s,
    )
    await shelf.start(config.models)
    # Threads that handle texts give way to the event loop sooner than after Python's 5 ms.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # A vocabulary's tables among it.
    memory.settle()
    server = GrpcServer(settings.listen)
    server.add(add_to_server, servicer, SERVICE_NAME)
    await server.start()
    exposed = metrics.serve(settings.metrics_listen, "tokenizer.metrics_listen")
    following = asyncio.create_task(source().follow(lambda tables: shelf.apply(load_models(tables))))
    try:
        await shelf.start_workers()
        await server.set_serving(True)
        say_ready("tokenizer", grpc=server.address, metrics=exposed)
        await wait_for_signal()
        await server.stop(settings.drain_limit_s)
    finally:
        following.cancel()
        await shelf.close()
        metrics.close()
        deferred.flush()
        telemetry.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(run("tokenizer_svc", names.TOKENIZER, __doc__, _serve))
