"""What it is worth that front and core are two processes: the same engine with the core on a thread instead.

The simulated runner's step takes 0 or 2 ms of sleep; what a step takes beyond that is Python: scheduling, and
in the one-process variant protobuf and gRPC under the same GIL. The load comes from a process of its own.

    python -m benchmarks.engine.process_split [--json OUT]
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import socket
import threading
import time
from typing import Any

import psutil
from millrace.common.v1 import context_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from benchmarks.engine.report import arguments, publish
from engine.config import EngineConfig, SchedulerConfig, SimulatedConfig
from engine.core import messages
from engine.core.__main__ import serve_core
from engine.core.frames import CoreSocket
from engine.service.core_client import CoreClient
from engine.service.engine_process import EngineProcess
from engine.service.servicer import FULL_NAME, EngineServicer
from observability.emit.config import ObservabilityConfig
from observability.emit.tracing import Telemetry
from runtime.channels import connect
from runtime.config import ModelConfig
from runtime.context import sign
from runtime.server import GrpcServer

_SECRET = b"a secret of the benchmark"
_NUM_STREAMS = 64
_NUM_TOKENS = 400


def _config(step_ms: float) -> EngineConfig:
    return EngineConfig(
        listen="127.0.0.1:0",
        simulated=True,
        scheduler=SchedulerConfig(max_num_seqs=_NUM_STREAMS),
        simulation=SimulatedConfig(step_ms=step_ms),
    )


class _ThreadAsProcess:
    """What the client asks of a process that has ended."""

    async def wait(self) -> int:
        return 0


class ThreadedCoreClient(CoreClient):
    """The core in a thread of this process, over the same socket and frames."""

    async def start(self) -> None:
        """Starts the thread."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        threading.Thread(target=serve_core, args=(CoreSocket(theirs),), daemon=True).start()
        self._process = _ThreadAsProcess()  # type: ignore[assignment]
        await self.connect(ours)

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()


async def _load(target: str) -> dict[str, float]:
    channel = connect(target)
    call = engine_pb2_grpc.EngineServiceStub(channel).Attach(wait_for_ready=True)
    await call.write(engine_pb2.AttachRequest(hello=engine_pb2.Hello(gateway="benchmark")))
    await call.read()
    context = sign(
        context_pb2.RequestContext(request_id="r", issued_unix_ms=time.time_ns() // 1_000_000), _SECRET
    )
    for handle in range(_NUM_STREAMS):
        options = sampling_pb2.SamplingOptions(seed=handle, max_tokens=_NUM_TOKENS, logprobs=5)
        submit = engine_pb2.Submit(
            handle=handle, context=context, prompt_token_ids=range(16), sampling=options
        )
        await call.write(engine_pb2.AttachRequest(submit=submit))
    ended, arrivals = 0, []
    while ended < _NUM_STREAMS:
        message = await call.read()
        arrivals.append(time.perf_counter())
        ended += sum(output.finish_reason != 0 for output in message.outputs.outputs)
    call.cancel()
    await channel.close()
    gaps = sorted(after - before for before, after in itertools.pairwise(arrivals))
    return {
        "mean": sum(gaps) / len(gaps) * 1000,
        "p99": gaps[int(len(gaps) * 0.99)] * 1000,
        "n": len(arrivals),
    }


def _client(target: str, results: Any) -> None:
    results.put(asyncio.run(_load(target)))


async def _measure(client_class: type[CoreClient], config: EngineConfig) -> dict[str, float]:
    telemetry = Telemetry("engine", ObservabilityConfig(), None)
    engine = EngineProcess(config, ModelConfig(path="/nonexistent/simulated"), telemetry, client_class)
    server = GrpcServer(config.listen)
    server.add(
        engine_pb2_grpc.add_EngineServiceServicer_to_server, EngineServicer(engine, _SECRET, 60.0), FULL_NAME
    )
    await server.start()
    await engine.start()
    spawning = multiprocessing.get_context("spawn")
    results = spawning.Queue()
    process = spawning.Process(target=_client, args=(f"127.0.0.1:{server.port}", results))
    core = psutil.Process(engine.core.pid)
    cpu_before = sum(core.cpu_times()[:2]), time.process_time()
    process.start()
    figures: dict[str, float] = await asyncio.get_running_loop().run_in_executor(None, results.get)
    cpu_after = sum(core.cpu_times()[:2]), time.process_time()
    for name, before, after in zip(("core", "front"), cpu_before, cpu_after, strict=True):
        figures[name] = (after - before) / figures["n"] * 1000
    process.join()
    await server.stop(0)
    engine.core.send(messages.Stop())
    await engine.core.ended.wait()
    return figures


def main() -> None:
    """Measures both variants, without and with work in the steps."""
    options = arguments(__doc__ or "")
    sides = {"one process, core on a thread": ThreadedCoreClient, "ours: two processes": CoreClient}
    rows = []
    for step_ms in (0.0, 2.0):
        for name, client_class in sides.items():
            figures = asyncio.run(_measure(client_class, _config(step_ms)))
            rows.append(
                {
                    "variant": name,
                    "work of a step ms": step_ms,
                    "mean step interval ms": figures["mean"],
                    "p99 ms": figures["p99"],
                    "tokens/s": _NUM_STREAMS / figures["mean"] * 1000,
                    "CPU ms a step, core's process": figures["core"],
                    "front's process": figures["front"],
                }
            )
    notes = (
        f"{_NUM_STREAMS} streams with 5 log-probabilities per token; intervals seen by the client. The "
        "processor time per step hardly depends on what else the machine does: what the front takes is what "
        "one GIL would add to every step."
    )
    publish("Front and core: one process or two", rows, options.json, notes)


if __name__ == "__main__":
    main()
