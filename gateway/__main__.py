"""`python -m gateway [--config FILE]`: one gateway process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from gateway.app import Gateway
from gateway.settings import Settings, load_settings
from observability.emit import logging as json_logging
from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from services import memory, tls
from services.config import load_section, read_tables
from services.errors import ConfigError
from services.server import wait_for_signal


async def _serve(settings: Settings, config: ObservabilityConfig) -> None:
    tls.use(settings.security)
    telemetry = tracing.setup(names.GATEWAY, config)
    metrics = Metrics(max_label_values=config.max_tenant_labels)
    listen = settings.gateway
    gateway = Gateway(settings, telemetry, metrics)
    exposed = ""
    metrics_server = None
    if listen.metrics_listen:
        try:
            metrics_server = metrics.serve(listen.metrics_listen)
        except OSError as error:
            raise ConfigError(f"gateway.metrics_listen: {listen.metrics_listen}: {error}") from error
        exposed = f" metrics={metrics_server.address}"
    await gateway.start()
    stopped = asyncio.create_task(wait_for_signal())
    ready = asyncio.create_task(gateway.wait_ready())
    await asyncio.wait([stopped, ready], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()
        # Vocabulary, modules and wiring live as long as the process: keep collections away from them.
        memory.settle()
        await gateway.grpc.set_serving(True)
        grpc = f"{listen.grpc_listen.rpartition(':')[0]}:{gateway.grpc.port}"
        http = f"{listen.http_listen.rpartition(':')[0]}:{gateway.http.port}"
        print(f"ready gateway grpc={grpc} http={http}{exposed}", flush=True)
        await stopped
    ready.cancel()
    await gateway.drain()
    await gateway.stop()
    telemetry.shutdown()
    if metrics_server is not None:
        metrics_server.close()


def main() -> int:
    """Runs until SIGTERM or SIGINT; 2 when the configuration cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="configuration file (TOML)")
    arguments = parser.parse_args()
    try:
        tables = read_tables(arguments.config)
        settings = load_settings(tables)
        config = load_section(tables, "observability", ObservabilityConfig)
        json_logging.configure("gateway", config.log_level)
        uvloop.run(_serve(settings, config))
    except ConfigError as error:
        print(f"python -m gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
