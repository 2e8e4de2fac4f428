"""WebSockets of the HTTP faces: each message is a request of its own, which is answered by frames.

A turn is counted, limited, traced and written into the books as an HTTP request is: it is an `Exchange` whose
response is written elsewhere. Turns of a socket are answered one after the other, as they came; meanwhile the
socket is read, so that a client that leaves is noticed at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from uvicorn.protocols.utils import ClientDisconnected

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import HttpCallers
from gateway.config import SocketConfig
from gateway.http.exchange import Exchange, Handler, Receive, Send
from gateway.http.socket_wire import NORMAL, RESTARTS, WIRE, SocketWire
from gateway.intake.intake import ByteLease, Intake
from gateway.types.error_form import ErrorForm, ErrorForms
from gateway.types.request import Caller
from observability.emit import names
from observability.emit.metrics import Metrics
from runtime.interceptors import drop_traceback

# Characters of the reason in a close frame: its payload has 125 bytes, two of which are the code.
_MAX_REASON = 100


class SocketHandler(Protocol):
    """What the messages of one connection mean to a face."""

    async def answer(self, turn: Exchange) -> None:
        """Answers one message."""

    def frame_of(self, error: MillraceError, headers: Mapping[str, str] | None = None) -> bytes:
        """An error as the API writes it, with what HTTP would say in headers."""

    def expired(self, lifetime_s: float) -> bytes:
        """What is said before a connection is closed that has been open for longest."""

    def close(self) -> None:
        """The connection is over: what was kept for it goes."""


@dataclass(frozen=True, kw_only=True)
class SocketRoute:
    """A path that sockets are opened at: what makes a connection's handler, and each turn's check."""

    open: Callable[[ErrorForm], SocketHandler]
    checked: Callable[[Handler], Handler]


_Tell: TypeAlias = Callable[[Exchange, Exception], Awaitable[None]]


class Turn(Exchange):
    """One message of a client, and the frames that answer it."""

    def __init__(self, session: SocketSession, scope: dict[str, Any], data: bytes, number: int) -> None:
        """The request's id is the connection's with the turn's number."""
        super().__init__(scope, session.receive, session.send, session.sockets.body_limit, session.form)
        self.headers[b"x-request-id"] = f"{session.caller.identity.request_id}-{number}".encode("latin-1")
        self._session = session
        self._pieces = [data]
        self.num_body_bytes = len(data)
        self.client_gone = session.gone

    def identify(self, callers: HttpCallers) -> None:
        """Finds out again who calls: a key may have been revoked since the turn before."""
        if self.caller is None and self.caller_error is None:
            first = self._session.caller
            if first.context is None:
                super().identify(callers)
            else:
                # Somebody in front has signed for the connection; the signature is of its first moment.
                self.caller = callers.again(first, self.header(b"x-request-id"), self.received_s)

    def watch_client(self, on_gone: Callable[[], None]) -> None:
        """See Exchange."""
        self._on_gone = on_gone
        if self.client_gone:
            asyncio.get_running_loop().call_soon(self.left)

    def left(self) -> None:
        """The client is gone."""
        self.client_gone = True
        if self._on_gone is not None and not self.ended:
            self._on_gone()

    async def respond(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Sockets have no other answers than events and errors."""
        raise AssertionError(f"a turn is answered by events, and not by a response with status {status}")

    async def respond_error(self, error: MillraceError) -> None:
        """See Exchange."""
        self.begun = self.ended = True
        headers = {name.decode(): value.decode("latin-1") for name, value in self.response_headers()}
        told = {**self.error_form.headers(error), **headers}
        await self._session.write(self._session.handler.frame_of(error, told))

    async def begin_events(self) -> None:
        """See Exchange; there is no head."""
        self.begun = True

    async def write(self, body: bytes) -> None:
        """Server-sent events, whose data becomes frames; returns when the client has room for more."""
        for frame in frames_of(body):
            await self._session.write(frame)

    async def end_events(self, body: bytes) -> None:
        """See Exchange."""
        self.ended = True
        await self.write(body)


def frames_of(written: bytes) -> Iterator[bytes]:
    """The data of server-sent events, without the mark at their end."""
    for block in written.split(b"\n\n"):
        data = block.partition(b"data: ")[2]
        if data and data != b"[DONE]":
            yield data


class Sockets:
    """All sockets of one process."""

    def __init__(
        self,
        routes: Mapping[str, SocketRoute],
        *,
        callers: HttpCallers,
        intake: Intake,
        error_forms: ErrorForms,
        body_limit: int,
        config: SocketConfig,
        tell: _Tell,
        metrics: Metrics,
    ) -> None:
        """`tell` answers what a turn raises."""
        self.routes, self.callers, self.intake, self.error_forms = routes, callers, intake, error_forms
        self.body_limit, self.config, self.tell = body_limit, config, tell
        self._open: set[SocketSession] = set()
        self._num_of: Counter[str] = Counter()
        self._metrics = metrics
        metrics.begin(names.SOCKET_ENDS)
        metrics.set_function(names.OPEN_SOCKETS, lambda: len(self._open))

    async def serve(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """One connection, from its handshake on; see ASGI 3."""
        session, end = SocketSession(self, scope, receive, send), "failed"
        try:
            end = await session.serve()
        finally:
            self._metrics.add(names.SOCKET_ENDS, reason=end)

    def retire(self) -> None:
        """Closes each socket as soon as no turn of it runs."""
        for session in list(self._open):
            session.retire()

    @contextmanager
    def place(self, session: SocketSession, tenant: str) -> Iterator[None]:
        """Among the tenant's sockets; raises CONCURRENCY_EXCEEDED where there is none left."""
        most = self.config.max_of_tenant
        if self._num_of[tenant] >= most:
            raise MillraceError(
                Reason.CONCURRENCY_EXCEEDED,
                f"this tenant has {most} WebSockets open at this gateway (gateway.socket.max_of_tenant); "
                "close some",
                metadata={"limit": str(most)},
                retry_after_s=1.0,
            )
        self._num_of[tenant] += 1
        self._open.add(session)
        try:
            yield
        finally:
            self._open.discard(session)
            self._num_of[tenant] -= 1
            # Counts of 0 are forgotten.
            self._num_of += Counter()


class SocketSession:
    """One connection: reads all the time, and answers one message after the other."""

    caller: Caller

    def __init__(self, sockets: Sockets, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        self.sockets = sockets
        self.receive, self.send = receive, send
        self.gone = False
        self.form = sockets.error_forms.of(scope["path"])
        self._scope = {**scope, "method": "POST"}
        self._wire: SocketWire = scope["state"][WIRE]
        route = sockets.routes[scope["path"]]
        self.handler = route.open(self.form)
        self._answer = route.checked(self.handler.answer)
        self._waiting: deque[tuple[bytes, ByteLease | None]] = deque()
        self._more = asyncio.Event()
        self._turn: Turn | None = None
        self._num_turns = 0
        self._retiring = False
        self._ends_s = time.monotonic() + sockets.config.lifetime_s

    async def serve(self) -> str:
        """Until one of both sides closes it; returns why, as `names.SOCKET_ENDS` has it."""
        if (await self.receive())["type"] != "websocket.connect":
            return "client"
        hello = Exchange({**self._scope, "method": "GET"}, self.receive, self._send_refusal, 0, self.form)
        try:
            hello.identify(self.sockets.callers)
            self.caller = hello.verified_caller
            with self.sockets.place(self, self.caller.identity.tenant):
                return await self._serve(hello)
        except MillraceError as error:
            await self.sockets.tell(hello, error)
            return "refused"
        finally:
            self.handler.close()

    async def _send_refusal(self, message: dict[str, Any]) -> None:
        await self.send({**message, "type": f"websocket.{message['type']}"})

    async def _serve(self, hello: Exchange) -> str:
        tenant = self.caller.identity.tenant
        self._wire.lease = lambda: self.sockets.intake.lease(tenant)
        self._wire.frame_of = self.handler.frame_of
        hello.begun = True
        await self.send({"type": "websocket.accept", "headers": hello.response_headers()})
        reading = asyncio.create_task(self._read(), name="read socket")
        try:
            return await self._converse()
        except ClientDisconnected:
            return "client"
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            for _, lease in self._waiting:
                if lease is not None:
                    lease.release()

    async def _read(self) -> None:
        try:
            while (message := await self.receive())["type"] != "websocket.disconnect":
                await self._take(message)
        except ClientDisconnected:
            pass
        self._leave()

    async def _take(self, message: dict[str, Any]) -> None:
        most, lease = self.sockets.config.max_waiting, message["lease"]
        problem = ""
        if not message["is_text"]:
            problem = "the frame is binary; send each event as JSON in a text frame"
        elif len(self._waiting) >= most:
            problem = f"{most} messages wait on this socket already; wait for the end of a response"
        if not problem:
            self._waiting.append((message["data"], lease))
            self._more.set()
            return
        if lease is not None:
            lease.release()
        reason = Reason.QUEUE_LIMIT_EXCEEDED if message["is_text"] else Reason.MALFORMED_BODY
        await self.sockets.intake.refusals.throttle(self.caller.identity.tenant)
        await self.write(self.handler.frame_of(MillraceError(reason, problem)))

    def _leave(self) -> None:
        self.gone = True
        self._more.set()
        if self._turn is not None:
            self._turn.left()

    def retire(self) -> None:
        """Closes it as soon as no turn runs."""
        self._retiring = True
        self._more.set()

    async def _converse(self) -> str:
        while not self.gone:
            left_s = self._ends_s - time.monotonic()
            if self._retiring:
                await self._close(RESTARTS, "this gateway is shutting down; connect again")
                return "restart"
            if left_s <= 0:
                await self.write(self.handler.expired(self.sockets.config.lifetime_s))
                await self._close(NORMAL, "the connection has reached its longest time; connect again")
                return "lifetime"
            if self._waiting:
                await self._answer_next()
                continue
            self._more.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._more.wait()
            except TimeoutError:
                pass
        return "client"

    async def _answer_next(self) -> None:
        data, lease = self._waiting.popleft()
        self._num_turns += 1
        turn = self._turn = Turn(self, self._scope, data, self._num_turns)
        del data
        try:
            await self._answer(turn)
        except asyncio.CancelledError as error:
            # The client left while its request was being accepted: nobody reads an answer.
            task = asyncio.current_task()
            if not self.gone or task is None or task.uncancel():
                raise
            drop_traceback(error)
        except Exception as error:
            if isinstance(error, MillraceError) and error.reason is Reason.DRAINING:
                self._retiring = True
            await self.sockets.tell(turn, error)
        finally:
            self._turn = None
            if lease is not None:
                lease.release()

    async def write(self, frame: bytes) -> None:
        """A text frame; returns when the client has room for more. Nothing happens where it is gone."""
        if self.gone:
            return
        try:
            await self.send({"type": "websocket.send", "text": frame.decode()})
        except (ClientDisconnected, RuntimeError):
            # It closes, or was closed for what its client has sent.
            self._leave()

    async def _close(self, code: int, reason: str) -> None:
        if not self.gone:
            await self.send({"type": "websocket.close", "code": code, "reason": reason[:_MAX_REASON]})
