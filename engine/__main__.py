"""`python -m engine [--config FILE]`: one engine, front process and core process."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from millrace.engine.v1 import engine_pb2_grpc

from engine.config import EngineConfig, load
from engine.service.engine_process import CoreDied, EngineProcess
from engine.service.servicer import FULL_NAME, EngineServicer
from engine.vllm_core.client import client_of
from observability.emit import names
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import Telemetry, setup
from runtime import memory, tls
from runtime.config import HealthConfig, SecurityConfig, load_section
from runtime.main import run, say_ready
from runtime.models import own_model
from runtime.server import GrpcServer, wait_for_signal

_log = logging.getLogger(__name__)

# The gRPC server's own grace after everything has drained, in seconds.
_STOP_GRACE_S = 1.0
# How long health stays visibly NOT_SERVING before a process whose core is gone ends, in seconds.
_LOST_LINGER_S = 1.0
_EXIT_LOST = 70


async def _serve(tables: dict[str, Any], observing: ObservabilityConfig) -> int:
    """Exit code 0 after a drain, 70 when the core was lost."""
    telemetry = setup(names.ENGINE, observing)
    try:
        return await _run(tables, telemetry)
    except CoreDied as error:
        print(f"python -m engine: {error}", file=sys.stderr)
        return _EXIT_LOST
    finally:
        telemetry.shutdown()


async def _run(tables: dict[str, Any], telemetry: Telemetry) -> int:
    """Until SIGTERM, SIGINT or the loss of the core."""
    config = load(tables)
    model = own_model(tables)
    security = load_section(tables, "security", SecurityConfig)
    tls.use(security)
    health = load_section(tables, "health", HealthConfig)
    engine = EngineProcess(config, model, telemetry, client_of(config.make), health)
    server = GrpcServer(config.listen)
    servicer = EngineServicer(engine, security.secret(), security.max_context_age_s)
    server.add(engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer, FULL_NAME)
    await server.start()
    # A signal ends start-up as well: loading may take minutes.
    signalled = asyncio.create_task(wait_for_signal())
    starting = asyncio.create_task(engine.start())
    await asyncio.wait({signalled, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await engine.stop()
        await server.stop(0)
        return 0
    try:
        await starting
        exposed = engine.metrics.metrics.serve(config.metrics_listen, "engine.metrics_listen")
    except BaseException:
        signalled.cancel()
        await engine.stop()
        await server.stop(0)
        raise
    # Objects of start-up live as long as the process, so garbage collections need not visit them.
    memory.settle()
    await server.set_serving(True)
    say_ready("engine", grpc=server.address, metrics=exposed, **engine.expected())
    return await _until_end(engine, server, signalled, config)


async def _until_end(
    engine: EngineProcess, server: GrpcServer, signalled: asyncio.Task[Any], config: EngineConfig
) -> int:
    lost = asyncio.create_task(engine.lost.wait())
    await asyncio.wait({signalled, lost}, return_when=asyncio.FIRST_COMPLETED)
    await server.set_serving(False)
    if not lost.done():
        lost_while_draining = asyncio.create_task(engine.drain(config.drain_limit_s))
        await asyncio.wait({lost, lost_while_draining}, return_when=asyncio.FIRST_COMPLETED)
        lost_while_draining.cancel()
    code = 0
    if engine.lost.is_set():
        _log.error("the core process is lost; the engine ends")
        await engine.flush()
        if not signalled.done():
            await asyncio.wait({signalled}, timeout=_LOST_LINGER_S)
        code = _EXIT_LOST
    lost.cancel()
    signalled.cancel()
    await server.stop(_STOP_GRACE_S)
    await engine.stop()
    return code


if __name__ == "__main__":
    sys.exit(run("engine", names.ENGINE, __doc__, _serve))
