"""`python -m observability [--config FILE]`: the local span store as a service."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from observability.analysis.receiver import SERVICE_NAME, TraceReceiver, add_to_server
from observability.analysis.store import SpanStore, StoreError
from observability.emit import logging as json_logging
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from services.config import load_section, read_tables
from services.errors import ConfigError
from services.server import GrpcServer, wait_for_signal

# Exporters send what they hold when they end; the store outlives them by this long.
_STOP_GRACE_S = 2.0


async def _serve(config: ObservabilityConfig) -> None:
    metrics = Metrics(max_label_values=config.max_tenant_labels)
    try:
        store = SpanStore(Path(config.store), max_spans=config.max_spans, max_bytes=config.max_store_bytes)
    except StoreError as error:
        raise ConfigError(f"observability.store: {error}") from error
    receiver = TraceReceiver(store, metrics)
    server = GrpcServer(config.listen)
    server.add(add_to_server, receiver, SERVICE_NAME)
    await server.start()
    host = config.listen.rpartition(":")[0]
    ready = f"ready observability otlp={host}:{server.port}"
    metrics_server = None
    if config.metrics_listen:
        try:
            metrics_server = metrics.serve(config.metrics_listen)
        except OSError as error:
            raise ConfigError(f"observability.metrics_listen: {config.metrics_listen}: {error}") from error
        ready += f" metrics={metrics_server.address}"
    writer = asyncio.create_task(receiver.write_until_closed())
    await server.set_serving(True)
    print(ready, flush=True)
    await wait_for_signal()
    await server.stop(_STOP_GRACE_S)
    receiver.close()
    await writer
    store.close()
    if metrics_server is not None:
        metrics_server.close()


def main() -> int:
    """Runs until SIGTERM or SIGINT; 2 when the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m observability", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="configuration file (TOML)")
    arguments = parser.parse_args()
    try:
        config = load_section(read_tables(arguments.config), "observability", ObservabilityConfig)
        json_logging.configure("observability", config.log_level)
        asyncio.run(_serve(config))
    except ConfigError as error:
        print(f"python -m observability: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
