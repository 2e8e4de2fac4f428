"""`python -m observability [--config FILE]`: the local span store as a service."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from observability.analysis.receiver import SERVICE_NAME, TraceReceiver, add_to_server
from observability.analysis.source import StoreError
from observability.analysis.store import SpanStore
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from runtime.errors import ConfigError
from runtime.main import run, say_ready
from runtime.server import GrpcServer, wait_for_signal

# Exporters send what they hold when they end; the store outlives them by this long.
_STOP_GRACE_S = 2.0


async def _serve(_: dict[str, Any], config: ObservabilityConfig) -> int:
    metrics = Metrics(max_label_values=config.max_tenant_labels)
    try:
        store = SpanStore(Path(config.store), max_spans=config.max_spans, max_bytes=config.max_store_bytes)
    except StoreError as error:
        raise ConfigError(f"observability.store: {error}") from error
    receiver = TraceReceiver(store, metrics)
    server = GrpcServer(config.listen)
    server.add(add_to_server, receiver, SERVICE_NAME)
    await server.start()
    exposed = metrics.serve(config.metrics_listen, "observability.metrics_listen")
    writer = asyncio.create_task(receiver.write_until_closed())
    await server.set_serving(True)
    say_ready("observability", otlp=server.address, metrics=exposed)
    await wait_for_signal()
    await server.stop(_STOP_GRACE_S)
    receiver.close()
    await writer
    store.close()
    metrics.close()
    return 0


if __name__ == "__main__":
    sys.exit(run("observability", "observability", __doc__, _serve))
