"""Background responses: computed without a connection, their events kept, and taken over from a gateway that
is gone.

Whoever takes one over computes it anew, with the same seed, and keeps what comes after the events that are
there: events are cut by their text (see Recut) and ids derive from the request's, so that they are the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from contract.errors import MillraceError, Reason
from gateway.auth.verifier import Arrival
from gateway.faces.responses.answer_types import Response
from gateway.faces.responses.keeping import HeldRequest, plain, sent
from gateway.faces.responses.recut import Recut
from gateway.faces.responses.requests import RESPONSE_DECODER, Asked, ResponseBody
from gateway.faces.responses.tools import Toolbox
from gateway.faces.responses.writer import DONE, ResponseWriter
from gateway.http.errors import unexpected
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.pipeline import Pipeline
from gateway.store.background import BackgroundWork, LeaseLost
from gateway.store.store import Store
from gateway.types.request import Caller, Identity

_log = logging.getLogger(__name__)
# How often events are written.
_FLUSH_S = 0.1
# Signs of life, and looks for what others left, within the time of a lease.
_BEATS = 4
# Responses that are taken over at a time.
_TAKEN_TOGETHER = 4
# A response under which so many gateways were lost may be what they were lost by.
_MAX_OWNERS = 4
_RETRY_S = 1.0


class _Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to compute a response anew."""

    identity: Identity
    # JSON of the body, the items before it in its input.
    body: bytes
    seed: int
    resource: bytes
    conversation_id: str


_encode_task = msgspec.msgpack.Encoder().encode
_decode_task = msgspec.msgpack.Decoder(_Task).decode
_decode_response = msgspec.json.Decoder(Response).decode


def cancelled(resource: dict[str, Any], written: Sequence[bytes]) -> tuple[dict[str, Any], list[bytes]]:
    """A response that is cancelled: with what its events have told of it, which the last ones end."""
    writer = ResponseWriter(_decode_response(msgspec.json.encode(resource)), Toolbox(), streams=True)
    writer.take_up(written)
    # Its stream is whole, even where nothing of it was written yet.
    last = (b"" if written else writer.begin()) + writer.cancel()
    return plain(writer.response), _events_of(last)


def _events_of(written: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in written.removesuffix(DONE).split(b"\n\n")[:-1]]


class Writers(Protocol):
    """Understands bodies, and makes the writers of answers."""

    async def understand(self, caller: Caller, body: ResponseBody) -> Asked:
        """The domain request."""

    def writer(self, body: ResponseBody, asked: Asked, attempt: Attempt, *, streams: bool) -> ResponseWriter:
        """Who writes the answer of an accepted request."""


class BackgroundRun:
    """One response that this gateway computes: events that are not written yet, and those to be skipped."""

    def __init__(self, store: Store, work: BackgroundWork, conversation_id: str) -> None:
        self.work = work
        self.cancel: Callable[[], None] = lambda: None
        self._store = store
        self._conversation_id = conversation_id
        self._pending: list[bytes] = []
        self._num_written = work.num_events
        self._num_seen = 0
        self._lock = asyncio.Lock()
        self._written_s = time.monotonic()
        self.is_lost = False

    def take(self, written: bytes) -> None:
        """Events; raises INTERNAL where they differ from those that are there."""
        for event in _events_of(written):
            self._num_seen += 1
            if self._num_seen > self.work.num_events:
                self._pending.append(event)
            elif self._num_seen == self.work.num_events and event != self.work.last_event:
                raise MillraceError(
                    Reason.INTERNAL,
                    "the gateway that computed this response is gone, and computed anew it is another one; "
                    "send the request again",
                )

    async def keep_writing(self, beat_s: float) -> None:
        """Writes what comes, and signs of life; ends the work where the lease is lost."""
        while not self.is_lost:
            await asyncio.sleep(_FLUSH_S)
            if self._pending or time.monotonic() - self._written_s > beat_s:
                try:
                    await self.write()
                except LeaseLost:
                    self.is_lost = True
                    self.cancel()
                except MillraceError as error:
                    # It is in the log; what was not written is written with what follows.
                    await asyncio.sleep(error.retry_after_s or _RETRY_S)

    async def write(self) -> None:
        """Writes what has come; raises LeaseLost and STORE_UNAVAILABLE."""
        async with self._lock:
            events, background = list(self._pending), self._store.background
            await self._store.call(background.add, self.work, self._num_written, events)
            self._forget(len(events))

    def _forget(self, num_events: int) -> None:
        del self._pending[:num_events]
        self._num_written += num_events
        self._written_s = time.monotonic()

    async def finish(self, response: Response) -> None:
        """Writes the end, as soon as that can be done; raises LeaseLost."""
        resource = plain(response)
        conversation = self._conversation_id if response.status in ("completed", "incomplete") else ""
        async with self._lock:
            while True:
                end = partial(self._store.background.finish, self.work, resource, self._num_written)
                try:
                    await self._store.call(end, list(self._pending), conversation)
                except MillraceError as error:
                    if error.reason is not Reason.STORE_UNAVAILABLE:
                        if not conversation:
                            raise
                        # It was deleted, or is full: the answer is there without it.
                        conversation = ""
                    await asyncio.sleep(error.retry_after_s or 0)
                else:
                    return

    async def failed(self, response: Response, error: MillraceError) -> Response:
        """The response as it ends by an error: with what its events have told of it, which the last ones end.
        Raises LeaseLost where it was deleted meanwhile.
        """
        writer = ResponseWriter(response, Toolbox(), streams=True)
        async with self._lock:
            told = await self._told()
            writer.take_up(told)
            self._pending += _events_of((b"" if told else writer.begin()) + writer.fail(error))
        return writer.response

    async def _told(self) -> list[bytes]:
        """Its events so far, as soon as those can be read that are written."""
        work, told = self.work, list[bytes]()
        while len(told) < self._num_written:
            read = partial(self._store.background.events, work.tenant, work.response_id, len(told) - 1)
            try:
                events, _ = await self._store.call(read)
            except MillraceError as failure:
                if failure.reason is not Reason.STORE_UNAVAILABLE:
                    raise LeaseLost from failure
                await asyncio.sleep(failure.retry_after_s or _RETRY_S)
            else:
                if not events:
                    raise LeaseLost
                told += events
        return told + self._pending


class BackgroundResponses:
    """The background responses of one gateway."""

    def __init__(self, pipeline: Callable[[], Pipeline], store: Store, writers: Writers) -> None:
        self._pipeline = pipeline
        self._store = store
        self._writers = writers
        self._runs: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._beat_s = store.config.lease_s / _BEATS

    def start(self) -> None:
        """Begins to look for responses whose gateways are gone."""
        self._watch = asyncio.create_task(self._keep_taking_over(), name="take over responses")

    async def close(self) -> None:
        """Leaves what is not complete to other gateways."""
        tasks = [*self._runs, *([self._watch] if self._watch else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def create(self, caller: Caller, kept: HeldRequest, asked: Asked) -> tuple[Response, str | None]:
        """Accepts a response that goes on without its caller, and says what the model has not seen of its
        prompt; raises as `Pipeline.begin`, and STORE_FULL.
        """
        caller = self._without_connection(caller.identity)
        attempt = await self._pipeline().begin(caller, asked.request)
        try:
            writer = self._writers.writer(kept.body, asked, attempt, streams=True)
            writer.response = replace(kept.told(writer.response), background=True)
            task = _Task(
                identity=caller.identity,
                body=msgspec.json.encode(sent(kept.body)),
                seed=attempt.stream.seed,
                resource=msgspec.json.encode(writer.response),
                conversation_id=kept.conversation_id,
            )
            new = kept.new(writer.response)
            create = self._store.background.create
            work = await self._store.call(create, caller.identity.tenant, new, _encode_task(task))
        except BaseException as error:
            await attempt.close(error)
            raise
        response = writer.response
        run = BackgroundRun(self._store, work, kept.conversation_id)
        info = attempt.info
        self._begin(self._write(run, attempt, writer))
        return response, None if info.left_out is None else info.left_out.told(info.num_prompt_tokens)

    def _without_connection(self, identity: Identity) -> Caller:
        identity = replace(identity, deadline_unix_ms=None)
        return self._pipeline().callers.caller(identity, Arrival(received_s=time.monotonic()))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="background response")
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)

    async def _write(self, run: BackgroundRun, attempt: Attempt, writer: ResponseWriter) -> None:
        """Computes a response to its end, or leaves it to another gateway."""
        run.cancel = attempt.cancel
        writing = asyncio.create_task(run.keep_writing(self._beat_s), name="write events")
        response = writer.response
        try:
            async with attempt:
                run.take(writer.begin())
                recut = Recut(whole=attempt.call.request.sampling.logprobs is not None)
                while deltas := await attempt.drain():
                    attempt.first_chunk_written()
                    for delta in deltas:
                        for piece in recut.feed(delta):
                            run.take(writer.event(piece))
                writer.conclude(attempt.usage())
                run.take(writer.end())
            await self._end(run, writer.response)
        except asyncio.CancelledError:
            await self._store.call(self._store.background.release, run.work)
            raise
        except Exception as error:
            await self._failed(run, response, error)
        finally:
            writing.cancel()

    async def _failed(self, run: BackgroundRun, response: Response, error: Exception) -> None:
        if run.is_lost:
            return
        if isinstance(error, MillraceError) and error.reason is Reason.DRAINING:
            await self._store.call(self._store.background.release, run.work)
            return
        told = error if isinstance(error, MillraceError) else unexpected()
        if told is not error:
            _log.error("background response %s failed", response.id, exc_info=error)
        try:
            failed = await run.failed(response, told)
        except LeaseLost:
            run.is_lost = True
        else:
            await self._end(run, failed)

    async def _end(self, run: BackgroundRun, response: Response) -> None:
        try:
            await run.finish(response)
        except LeaseLost:
            # It was cancelled, or another gateway has it.
            run.is_lost = True

    # Others' responses.

    async def _keep_taking_over(self) -> None:
        while True:
            try:
                pipeline = self._pipeline()
                if not pipeline.draining:
                    take = self._store.background.take_over
                    for work in await self._store.call(take, _TAKEN_TOGETHER):
                        self._begin(self._compute_anew(work))
            except MillraceError:
                # Nothing is served yet, or the database cannot be used: that is in the log.
                pass
            except Exception:
                _log.exception("background responses of other gateways cannot be taken over, will retry")
            await asyncio.sleep(self._beat_s)

    async def _compute_anew(self, work: BackgroundWork) -> None:
        task = _decode_task(work.body)
        run = BackgroundRun(self._store, work, task.conversation_id)
        response = _decode_response(task.resource)
        _log.info("response %s is taken over at event %d", work.response_id, work.num_events)
        try:
            if work.num_owners > _MAX_OWNERS:
                raise MillraceError(
                    Reason.INTERNAL,
                    f"{work.num_owners - 1} gateways were lost under it; send another request",
                )
            attempt, writer = await self._again(task, response)
        except asyncio.CancelledError:
            await self._store.call(self._store.background.release, work)
            raise
        except Exception as error:
            if isinstance(error, MillraceError) and error.retry_after_s is not None:
                # Nobody waits at a connection: it is tried again, here or elsewhere.
                await self._store.call(self._store.background.release, work)
                return
            await self._failed(run, response, error)
            return
        await self._write(run, attempt, writer)

    async def _again(self, task: _Task, response: Response) -> tuple[Attempt, ResponseWriter]:
        caller = self._without_connection(task.identity)
        body = RESPONSE_DECODER.decode(task.body)
        asked = await self._writers.understand(caller, body)
        sampling = replace(asked.request.sampling, seed=task.seed)
        attempt = await self._pipeline().begin(caller, replace(asked.request, sampling=sampling))
        writer = self._writers.writer(body, asked, attempt, streams=True)
        writer.response = response
        return attempt, writer


async def follow(
    store: Store, tenant: str, id_: str, after: int, write: Callable[[bytes], Awaitable[None]]
) -> None:
    """Writes the events of a response with sequence numbers above `after`, until its end or until `write`
    raises. Raises STORED_NOT_FOUND where it is deleted meanwhile.
    """
    while True:
        events, is_over = await store.call(store.background.events, tenant, id_, after)
        after += len(events)
        await write(b"".join(events))
        if is_over:
            return
        if not events:
            await asyncio.sleep(_FLUSH_S)
