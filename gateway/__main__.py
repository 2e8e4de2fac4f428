"""`python -m gateway [--config FILE]`: one gateway process."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from gateway.app import Gateway
from gateway.settings import load_settings
from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from runtime import memory, tls
from runtime.addresses import with_port
from runtime.main import run, say_ready
from runtime.server import wait_for_signal


async def _serve(tables: dict[str, Any], config: ObservabilityConfig) -> int:
    memory.return_large_pieces()
    settings = load_settings(tables)
    tls.use(settings.security)
    telemetry = tracing.setup(names.GATEWAY, config)
    metrics = Metrics(max_label_values=config.max_tenant_labels)
    listen = settings.gateway
    gateway = Gateway(settings, telemetry, metrics)
    exposed = metrics.serve(listen.metrics_listen, "gateway.metrics_listen")
    await gateway.start()
    stopped = asyncio.create_task(wait_for_signal())
    ready = asyncio.create_task(gateway.wait_ready())
    await asyncio.wait([stopped, ready], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        # Vocabulary, modules and wiring live as long as the process: keep collections away from them.
        memory.settle()
        await gateway.grpc.set_serving(True)
        http = with_port(listen.http_listen, gateway.http.port)
        say_ready("gateway", grpc=gateway.grpc.address, http=http, metrics=exposed)
        await stopped
    ready.cancel()
    await gateway.drain()
    await gateway.stop()
    telemetry.shutdown()
    metrics.close()
    return 0


if __name__ == "__main__":
    sys.exit(run("gateway", names.GATEWAY, __doc__, _serve))
