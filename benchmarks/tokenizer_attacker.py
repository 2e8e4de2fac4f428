"""The hostile tenant of the isolation benchmark, and what shows how much of its effect is its own machine's.

Both are processes that compute only when nobody else wants to and yield again and again
(tokenizer_svc.workers.yielding): in truth they sit on other machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from benchmarks.tokenizer_requests import ATTACKS, Request, context
from contract.errors import MillraceError, Reason
from contract.proto.status import from_detail, from_rpc_error
from runtime.channels import CLIENT_OPTIONS
from runtime.outbox import Outbox
from runtime.server import GrpcServer
from runtime.stream_client import run_stream
from tokenizer_svc.messages.wire import SERVICE_NAME, LargeRequest, WireCall, add_to_server
from tokenizer_svc.service.stream import Calls, CallStream
from tokenizer_svc.workers.yielding import Yielding

# Different hostile requests of each kind in one window; sent again when all have been.
_ROUNDS = 8
_PREPARE = f"/{SERVICE_NAME}/Prepare"
_STREAM = f"/{SERVICE_NAME}/PrepareStream"
# Gateways send what is larger on a stream of its own.
_LARGE_BYTES = 256 * 1024

# Sends one message, by its place in the list, and says what became of it.
Send = Callable[[int], Awaitable[str]]


@contextlib.asynccontextmanager
async def _unary(target: str, messages: list[bytes]) -> AsyncIterator[Send]:
    async with grpc.aio.insecure_channel(target, options=CLIENT_OPTIONS) as channel:
        prepare: Any = channel.unary_unary(_PREPARE)

        async def send(number: int) -> str:
            try:
                await prepare(messages[number])
            except grpc.RpcError as error:
                return _refusal(from_rpc_error(error))
            return "accepted"

        yield send


@contextlib.asynccontextmanager
async def _streams(target: str, messages: list[bytes]) -> AsyncIterator[Send]:
    """As gateways do, with messages that are serialized already, each under its number."""
    waiting: dict[int, asyncio.Future[str]] = {}
    wires = [_called(number, message) for number, message in enumerate(messages)]

    def take(data: bytes) -> None:
        for each in tokenizer_pb2.PrepareStreamResponse.FromString(data).answers:
            failed = each.HasField("error")
            answer = waiting.pop(each.id)
            if not answer.done():
                answer.set_result(_refusal(from_detail(each.error)) if failed else "accepted")

    outboxes: list[Outbox[bytes]] = [Outbox(len, max_together=1) for _ in range(2)]

    async def send(number: int) -> str:
        waiting[number] = asyncio.get_running_loop().create_future()
        outboxes[len(wires[number]) > _LARGE_BYTES].put(wires[number])
        return await waiting[number]

    streams = [
        asyncio.ensure_future(
            run_stream(target, _STREAM, outbox, b"".join, take, unavailable=Reason.TOKENIZER_UNAVAILABLE)
        )
        for outbox in outboxes
    ]
    try:
        yield send
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


# How calls come to the service: as from gateways, or one by one.
WAYS = {"stream": _streams, "unary": _unary}


def _called(number: int, message: bytes) -> bytes:
    request = Request.FromString(message)
    call = tokenizer_pb2.PrepareCall(id=number, request=request)
    return tokenizer_pb2.PrepareStreamRequest(calls=[call]).SerializeToString()


def _refusal(error: MillraceError) -> str:
    return f"{error.reason} {error.metadata.get('overrun', '')}".strip()


async def flood(
    way: str, target: str, requests: list[tuple[str, bytes]], seconds: float, width: int
) -> Counter[str]:
    """So many hostile requests at a time, without a pause; what became of them."""
    outcomes: Counter[str] = Counter()
    under_way: set[int] = set()
    numbers = itertools.cycle(range(len(requests)))
    async with WAYS[way](target, [message for _, message in requests]) as send:

        async def one_after_the_other() -> None:
            while True:
                number = next(each for each in numbers if each not in under_way)
                under_way.add(number)
                outcomes[f"{requests[number][0]}: {await send(number)}"] += 1
                under_way.discard(number)

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(one_after_the_other() for _ in range(width))), seconds)
    return outcomes


def _attacker(way: str, attack: str, width: int, orders: Connection) -> None:
    """Orders are where to send, and for how many seconds; 0 ends it."""
    yielding = _step_back()
    numbers = itertools.count(1_000_000)
    while True:
        rounds = [ATTACKS[attack](next(numbers)) for _ in range(_ROUNDS)]
        requests = [(kind, _signed(request)) for each in rounds for kind, request in each.items()]
        orders.send("ready")
        target, seconds = orders.recv()
        if not seconds:
            return
        with yielding:
            outcomes = asyncio.run(flood(way, target, requests, seconds, width))
        orders.send(dict(outcomes))


def _signed(request: Request) -> bytes:
    request.context.CopyFrom(context("hostile"))
    return request.SerializeToString()


def _step_back() -> Yielding:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return Yielding()


class _Sink(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Refuses every request, after as long as the service has taken on the average."""

    pause_s = 0.0

    async def Prepare(  # type: ignore[override]
        self, request: Request | LargeRequest, context: Any
    ) -> tokenizer_pb2.PrepareResponse:
        await asyncio.sleep(self.pause_s)
        raise MillraceError(Reason.GRAMMAR_REFUSED, "nothing is done here")

    async def PrepareStream(  # type: ignore[override]
        self, requests: Calls, context: Any
    ) -> AsyncIterator[bytes]:
        async def refuse(call: WireCall) -> tokenizer_pb2.PrepareResponse:
            return await self.Prepare(call.request, context)

        async for message in CallStream(refuse).serve(requests):
            yield message


def _sink(orders: Connection) -> None:
    """Orders are the time that an answer takes."""
    yielding = _step_back()

    async def serve() -> None:
        server = GrpcServer("127.0.0.1:0")
        sink = _Sink()
        server.add(add_to_server, sink, SERVICE_NAME)
        await server.start()
        orders.send(f"127.0.0.1:{server.port}")
        asyncio.get_running_loop().add_reader(
            orders.fileno(), lambda: setattr(sink, "pause_s", orders.recv())
        )
        await asyncio.Event().wait()

    with yielding:
        asyncio.run(serve())


@contextlib.contextmanager
def _process(work: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process that is ended at the end, and the pipe that orders it about."""
    processes = multiprocessing.get_context("spawn")
    ours, theirs = processes.Pipe()
    process = processes.Process(target=work, args=(*arguments, theirs))
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


class Hostile:
    """The attacker, and the sink that it may send to instead of the service."""

    def __init__(self, attacker: Connection, sink: Connection, width: int) -> None:
        self._attacker = attacker
        self._sink = sink
        self._sink_target: str = sink.recv()
        self._width = width

    async def ready(self) -> None:
        """Until it has its messages."""
        await asyncio.to_thread(self._attacker.recv)

    def attack(self, target: str, seconds: float) -> None:
        """Begins to send."""
        self._attacker.send((target, seconds))

    def attack_nothing(self, seconds: float, num_calls: int) -> None:
        """The same to the sink, at the pace of so many calls in that time."""
        self._sink.send(self._width * seconds / max(num_calls, 1))
        self.attack(self._sink_target, seconds)

    async def outcomes(self) -> Counter[str]:
        """What became of the calls, when the time is over."""
        return Counter(await asyncio.to_thread(self._attacker.recv))


@contextlib.contextmanager
def hostile(way: str, attack: str, width: int) -> Iterator[Hostile]:
    """Both processes, started."""
    with _process(_attacker, way, attack, width) as attacker, _process(_sink) as sink:
        yield Hostile(attacker, sink, width)
