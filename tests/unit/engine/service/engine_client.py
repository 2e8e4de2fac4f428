"""A real engine process with simulated tokens, and a gateway's end of Attach."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.common.v1 import context_pb2, retention_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from runtime.channels import connect
from runtime.context import sign

SECRET = b"a secret of the tests"
MODEL_PATH = "/nonexistent/simulated"
ROOT = Path(__file__).resolve().parents[4]


class Engine:
    """A started engine process."""

    def __init__(self, process: asyncio.subprocess.Process, target: str, metrics: str = "") -> None:
        self.process = process
        self.metrics = metrics
        self.target = target
        self.channel = connect(target)
        self.stub = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    @property
    def core_pid(self) -> int:
        """Process id of the core, the only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (pid,) = children.split()
        return int(pid)

    async def serving(self) -> bool:
        answer = await self.health.Check(health_pb2.HealthCheckRequest())
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    async def check(self) -> engine_pb2.CheckInvariantsResponse:
        return await self.stub.CheckInvariants(engine_pb2.CheckInvariantsRequest())

    async def wait_until_idle(self) -> engine_pb2.CheckInvariantsResponse:
        """The books once no request is left; each look waits for the end of a step."""
        async with asyncio.timeout(20):
            while (answer := await self.check()).num_requests:
                pass
        return answer


@cache
def _kept_weights() -> tempfile.TemporaryDirectory[str]:
    """Where engines keep what they packed of their model: one of them packs, and no other imports torch."""
    return tempfile.TemporaryDirectory()


@asynccontextmanager
async def start_engine(model: str = "", **settings: str) -> AsyncIterator[Engine]:
    """Starts `python -m engine` on a free port; settings are MILLRACE_ENGINE__* values."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MILLRACE_")}
    environment |= {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'contract/stubs'}",
        "MILLRACE_ENGINE__LISTEN": "127.0.0.1:0",
        "MILLRACE_ENGINE__SIMULATED": "true",
        "MILLRACE_MODEL__PATH": model or MODEL_PATH,
        "MILLRACE_SECURITY__CONTEXT_SECRET": SECRET.decode(),
    }
    settings = {"packed_weights__path": _kept_weights().name, "packed_weights__min_bytes": "0"} | settings
    environment |= {f"MILLRACE_ENGINE__{key.upper()}": value for key, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine", cwd=ROOT, env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
    assert line.startswith("ready engine grpc="), line
    said = dict(part.partition("=")[::2] for part in line.split()[2:])
    engine = Engine(process, said["grpc"], said.get("metrics", ""))
    try:
        yield engine
    finally:
        await engine.channel.close()
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)


def signed(request_id: str = "r", secret: bytes = SECRET, **fields: object) -> context_pb2.SignedContext:
    """A signed context."""
    context = context_pb2.RequestContext(
        request_id=request_id,
        tenant="acme",
        tier="standard",
        issued_unix_ms=time.time_ns() // 1_000_000,
        **fields,  # type: ignore[arg-type]
    )
    return sign(context, secret)


class Gateway:
    """One Attach stream."""

    def __init__(self, engine: Engine, fingerprint: str = "vocabulary") -> None:
        self.call = engine.stub.Attach(wait_for_ready=True)
        self._fingerprint = fingerprint
        self.load: engine_pb2.EngineLoad | None = None

    async def hello(self, prefix_sample: int = 0) -> engine_pb2.EngineInfo:
        hello = engine_pb2.Hello(
            gateway="test", vocabulary_fingerprint=self._fingerprint, prefix_sample=prefix_sample
        )
        await self.call.write(engine_pb2.AttachRequest(hello=hello))
        first = await self.call.read()
        if first is grpc.aio.EOF:
            # Raises what the stream ended with.
            await self._raise()
        return first.welcome.info

    async def _raise(self) -> None:
        raise grpc.aio.AioRpcError(
            await self.call.code(),
            await self.call.initial_metadata(),
            await self.call.trailing_metadata(),
            details=await self.call.details(),
        )

    async def submit(
        self,
        handle: int,
        prompt: list[int],
        *,
        context: context_pb2.SignedContext | None = None,
        output: list[int] | None = None,
        adapter: str = "",
        version: str = "",
        entry_id: str = "",
        kv: retention_pb2.Retention | None = None,
        confidence_top: int = 0,
        hand_over: bytes = b"",
        source: engine_pb2.BlockSource | None = None,
        **sampling: object,
    ) -> None:
        options = sampling_pb2.SamplingOptions(**{"seed": 1, "max_tokens": 4, **sampling})  # type: ignore[arg-type]
        submit = engine_pb2.Submit(
            handle=handle,
            context=signed() if context is None else context,
            prompt_token_ids=prompt,
            output_token_ids=output or [],
            sampling=options,
            adapter=adapter,
            adapter_version=version,
            entry_id=entry_id,
            kv=kv,
            confidence_top=confidence_top,
            hand_over=hand_over,
            source=source,
        )
        await self.call.write(engine_pb2.AttachRequest(submit=submit))

    async def release(self, ticket: bytes) -> None:
        await self.call.write(engine_pb2.AttachRequest(release=engine_pb2.Release(ticket=ticket)))

    async def cancel(self, handle: int, reason: int = engine_pb2.CANCEL_REASON_CLIENT) -> None:
        cancel = engine_pb2.Cancel(handle=handle, reason=reason)  # type: ignore[arg-type]
        await self.call.write(engine_pb2.AttachRequest(cancel=cancel))

    async def read(self) -> engine_pb2.StepOutputs:
        message = await asyncio.wait_for(self.call.read(), 30)
        if message is grpc.aio.EOF:
            await self._raise()
        return message.outputs

    async def status(self) -> grpc.StatusCode:
        """Reads what is left of the stream; the status comes after it."""
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await asyncio.wait_for(self.call.read(), 30) is not grpc.aio.EOF:
                pass
        return await self.call.code()

    async def until_begun(self) -> None:
        """Reads until a request's first output; messages about load alone may come before it."""
        while not (await self.read()).outputs:
            pass

    async def until_ended(self, num_terminal: int) -> dict[tuple[int, int], list[engine_pb2.RequestOutput]]:
        """Outputs by (handle, choice) until so many choices, or failed requests, have ended."""
        outputs: dict[tuple[int, int], list[engine_pb2.RequestOutput]] = {}
        while num_terminal:
            for output in (await self.read()).outputs:
                outputs.setdefault((output.handle, output.choice_index), []).append(output)
                num_terminal -= output.finish_reason != 0
        return outputs


def tokens(outputs: list[engine_pb2.RequestOutput]) -> list[int]:
    """All token ids in order."""
    return [token for output in outputs for token in output.token_ids]
