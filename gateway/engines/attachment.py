"""One engine: the long-lived Attach stream, kept up, and the requests that are open on it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeAlias

import msgspec
from millrace.engine.v1 import engine_pb2

from contract.engines import AdapterInfo, CancelReason, EngineInfo, EngineLoad, KvEvent
from contract.errors import MillraceError, Reason
from contract.outputs import EngineTime
from contract.proto import engine as wire
from gateway.engines import mailbox
from gateway.engines.mailbox import Mailbox
from gateway.engines.types import EngineOutput, EngineState, Submission
from runtime.channels import trace_metadata
from runtime.streams import Outbox, OutboxFull, run_stream

_log = logging.getLogger(__name__)

_METHOD = "/millrace.engine.v1.EngineService/Attach"

FIRST_BACKOFF_S = 0.1
LAST_BACKOFF_S = 2.0
# How long an engine may take to say what it has done for a request that was taken back: it does so after the
# step that runs, which takes seconds where long prompts meet a slow processor. Nobody waits for this.
LAST_WORD_LIMIT_S = 10.0

# Reasons for which an engine is never used, because trying again changes nothing.
_INCOMPATIBLE = frozenset({Reason.VOCABULARY_MISMATCH, Reason.MODEL_NOT_FOUND})


class Lost:
    """Put into a mailbox when an open leg ends without an outcome: its engine is gone, or failed it."""

    __slots__ = ("choice_index", "error", "leg")

    def __init__(self, leg: Leg, error: MillraceError | None = None, choice_index: int = 0) -> None:
        self.leg = leg
        # The choice, or the text, that the error is of.
        self.choice_index = choice_index
        # The engine's description of itself; None when the engine is gone.
        self.error = error


class EngineReady:
    """Put into a mailbox when an engine takes requests again, for a request that waits for one."""

    __slots__ = ()


# A MillraceError ends the request: the gateway's own interruption.
Inbox: TypeAlias = Mailbox["EngineOutput | Lost | EngineReady | MillraceError"]


class Computed(msgspec.Struct):
    """What an engine has computed for a submission, by what came after that was taken back."""

    # The prompt, or a part of it.
    has_begun: bool = False
    num_tokens: int = 0
    # Of a submission of texts: those that were computed.
    texts: set[int] = msgspec.field(default_factory=set)


class Leg:
    """One submission that is open on an engine. Its handle is unique on the engine's connection only."""

    __slots__ = (
        "attachment",
        "choice_index",
        "computed",
        "connection",
        "engine_time",
        "handle",
        "inbox",
        "num_generated",
        "num_open_choices",
        "started",
        "uncached_tokens",
        "worked",
    )

    def __init__(
        self,
        attachment: Attachment,
        handle: int,
        submission: Submission,
        inbox: Inbox,
        cached_tokens: int = 0,
    ) -> None:
        self.attachment = attachment
        self.handle = handle
        # Which connection to the engine: the legs of one are lost together.
        self.connection = attachment.num_losses
        self.inbox = inbox
        num_tokens = len(submission.prompt_token_ids) + len(submission.output_token_ids)
        # Work before its first token, as far as is known here.
        self.uncached_tokens = max(0, num_tokens - cached_tokens)
        self.num_open_choices = len(submission.texts) or submission.sampling.n
        # A leg of one choice names it itself; otherwise the engine's numbers count from the first. Texts have
        # their own.
        alone = submission.sampling.n == 1 and not submission.texts
        self.choice_index = submission.choice_index if alone else None
        self.started = False
        # Time that the engine has spent on the request, and tokens that it has generated, as last reported.
        self.engine_time = EngineTime()
        self.num_generated = 0
        # After the request was taken back: what the engine still computed, and a future for its last report.
        self.computed = Computed()
        self.worked: asyncio.Future[None] | None = None

    def cancel(self, reason: CancelReason) -> None:
        """Takes the request back: nothing of it arrives in the inbox; `worked` ends with the last word."""
        self.attachment.cancel(self.handle, reason)


class Attachment:
    """Keeps one engine attached: connects, checks what it serves, demultiplexes, reconnects with backoff."""

    _is_stuck = False
    _retiring = False

    def __init__(
        self,
        target: str,
        *,
        gateway: str,
        fingerprint: Callable[[], str] = str,
        check: Callable[[str, EngineInfo], None] = lambda target, info: None,
        on_change: Callable[[Attachment], None] = lambda attachment: None,
        on_kv_events: Callable[[Attachment, list[KvEvent]], None] | None = None,
        on_unclaimed: Callable[[Mapping[str, int]], object] | None = None,
        silence_limit_s: float = math.inf,
        prefix_sample: int = 1,
    ) -> None:
        self.target = target
        # By which prompt cache keys choose among engines.
        self.number = int.from_bytes(blake2b(target.encode(), digest_size=8).digest())
        self.state = EngineState.CONNECTING
        self.info: EngineInfo | None = None
        self.load = EngineLoad()
        # Adapters by name, as this engine last reported them.
        self.adapters: Mapping[str, AdapterInfo] = {}
        # Prompt tokens of own submissions without a token yet, but for those that are expected in the cache.
        self.unstarted_tokens = 0
        # Why the last connection ended, for people.
        self.last_failure = ""
        self.num_losses = 0
        self._gateway = gateway
        self._prefix_sample = prefix_sample
        # The vocabulary that the engine is told; "" leaves it to `check`.
        self._fingerprint = fingerprint
        # Raises what keeps an engine of this description from being used.
        self._check = check
        # An engine that says nothing for so long is gone.
        self._silence_limit_s = silence_limit_s
        self._on_change = on_change
        self._on_kv_events = on_kv_events
        self._on_unclaimed = on_unclaimed
        self._handles = itertools.count(1)
        self._legs: dict[int, Leg] = {}
        # Taken back, until the engine has said its last word.
        self._taken_back: dict[int, Leg] = {}
        self._outbox = _outbox()
        self._task: asyncio.Task[None] | None = None
        # Ends the pause before the next connection.
        self._again = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Own submissions that have not ended."""
        return len(self._legs)

    def has_adapter(self, version: str, *, loaded: bool = False) -> bool:
        """Whether it serves an adapter in this version, or has it in memory."""
        served = (each for each in self.adapters.values() if each.version == version)
        return any(each.loaded or not loaded for each in served)

    def start(self) -> None:
        """Begins to connect, in the background, until `stop`."""
        self._task = asyncio.create_task(self._keep_attached(), name=f"attach {self.target}")
        # However it ends: nothing more is heard.
        self._task.add_done_callback(lambda _: self._hear_all())

    def reconsider(self) -> None:
        """Asks an engine again at once that cannot be used; what may be used has changed."""
        self._again.set()

    def retire(self) -> None:
        """Takes nothing new; the stream is closed when the last open request has ended, and the engine has
        said its last word of those that were taken back, or did not within the time for it.
        """
        self._retiring = True
        if self._taken_back:
            self._give_up_later()
        self._stop_if_retired()

    @property
    def has_ended(self) -> bool:
        """Whether its stream is closed for good."""
        return self._task is None or self._task.done()

    def _stop_if_retired(self) -> None:
        if self._retiring and not self._legs and not self._taken_back and self._task is not None:
            self._task.cancel()

    def _give_up_later(self) -> None:
        def give_up() -> None:
            self._hear_all()
            self._stop_if_retired()

        asyncio.get_running_loop().call_later(LAST_WORD_LIMIT_S, give_up)

    async def stop(self) -> None:
        """Closes the stream; the engine cancels what is still open on it, and is not heard on what was
        taken back before.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def submit(self, submission: Submission, inbox: Inbox, *, cached_tokens: int = 0) -> Leg:
        """Sends a request; its outputs go to `inbox`. The caller has checked that the state is READY, and
        expects so many leading tokens in the engine's cache: requests that share a prompt do not repel each
        other by work that is not there.
        """
        leg = Leg(self, next(self._handles), submission, inbox, cached_tokens)
        self._legs[leg.handle] = leg
        self.unstarted_tokens += leg.uncached_tokens
        self._pass_on(leg, submission)
        return leg

    def _pass_on(self, leg: Leg, submission: Submission) -> None:
        self._send(mailbox.submit(leg.handle, submission))

    def cancel(self, handle: int, reason: CancelReason) -> None:
        """Cancels a request that is open; does nothing for one that has ended."""
        leg = self._legs.get(handle)
        if leg is not None:
            leg.worked = asyncio.get_running_loop().create_future()
            self._taken_back[handle] = leg
            self._close(leg)
            self._send(mailbox.cancel(handle, reason))
            if self._retiring:
                self._give_up_later()

    def release(self, ticket: bytes) -> None:
        """Has the engine let go what it holds under a ticket, if it still does."""
        if self.info is not None:
            self._send(mailbox.release(ticket))

    @property
    def role(self) -> str:
        """See EngineInfo."""
        return "" if self.info is None else self.info.role

    def _send(self, message: engine_pb2.AttachRequest) -> None:
        try:
            self._outbox.put(message)
        except OutboxFull:
            if not self._is_stuck and self._task is not None:
                # Open requests are lost with the connection, and continue elsewhere.
                self._is_stuck = True
                self._task.cancel()

    def _close(self, leg: Leg) -> None:
        if self._legs.pop(leg.handle, None) is not None and not leg.started:
            self.unstarted_tokens -= leg.uncached_tokens
        if self._retiring:
            self._stop_if_retired()

    async def _keep_attached(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                await self._attach_once()
                self.last_failure = "the engine closed the stream"
            except MillraceError as error:
                self._note_failure(error)
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._is_stuck or task is None or task.uncancel():
                    raise
                self.last_failure = "the engine does not take what is sent to it"
            except Exception:
                # Whatever it is, the engine must come back.
                _log.exception("the stream of engine %s broke", self.target)
                self.last_failure = "the stream broke; the gateway's log has the details"
            was_attached = self.info is not None
            self._detach()
            backoff_s = FIRST_BACKOFF_S if was_attached else min(backoff_s * 2, LAST_BACKOFF_S)
            # Spread out, so that gateways do not come back all at once.
            self._again.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff_s * random.uniform(0.5, 1.0)):
                    await self._again.wait()

    def _note_failure(self, error: MillraceError) -> None:
        if error.reason in _INCOMPATIBLE:
            if error.message != self.last_failure:
                _log.error("engine %s is not used: %s", self.target, error.message)
            self._set_state(EngineState.INCOMPATIBLE)
        self.last_failure = error.message

    async def _attach_once(self) -> None:
        self._is_stuck = False
        self._outbox = _outbox()
        self._outbox.put(mailbox.hello(self._gateway, self._fingerprint(), self._prefix_sample))
        await run_stream(
            self.target,
            _METHOD,
            self._outbox,
            _joined,
            self._take,
            metadata=trace_metadata(),
            unavailable=Reason.ENGINE_UNAVAILABLE,
            silence_limit_s=self._silence_limit_s,
        )
        if self.info is None:
            raise MillraceError(
                Reason.ENGINE_UNAVAILABLE, f"engine {self.target} ended the stream before its welcome"
            )

    def _welcome(self, info: EngineInfo) -> None:
        self._check(self.target, info)
        self.info = info
        self.load = EngineLoad()
        self.last_failure = ""
        self._set_state(EngineState.READY)

    def _take(self, data: bytes) -> None:
        message = engine_pb2.AttachResponse.FromString(data)
        if self.info is None:
            if not message.HasField("welcome"):
                raise MillraceError(
                    Reason.ENGINE_UNAVAILABLE, f"engine {self.target} did not begin with its welcome"
                )
            self.adapters = wire.adapters(message.welcome.adapters)
            self._welcome(wire.info(message.welcome.info))
            return
        step = message.outputs
        if step.HasField("load"):
            self._set_load(wire.load(step.load))
        if step.HasField("adapters"):
            self.adapters = wire.adapters(step.adapters)
            self._on_change(self)
        self._dispatch(step.outputs)
        if step.kv_events and self._on_kv_events is not None:
            self._on_kv_events(self, [wire.kv_event(event) for event in step.kv_events])
        if step.unclaimed and self._on_unclaimed is not None:
            self._on_unclaimed({each.entry_id: each.num_tokens for each in step.unclaimed})

    def _dispatch(self, outputs: Any) -> None:
        legs = self._legs
        to_domain = mailbox.output
        for message in outputs:
            leg = legs.get(message.handle)
            if leg is None:
                # Cancelled here: on its way when the engine did not know yet, or its answer.
                if message.handle in self._taken_back and not message.withheld_tokens:
                    self._note_taken_back(message)
                continue
            self._take_output(leg, to_domain(message))

    def _take_output(self, leg: Leg, output: EngineOutput) -> None:
        leg.num_generated += len(output.token_ids)
        if output.statistics is not None:
            leg.num_generated += output.statistics.candidate_tokens
            leg.engine_time += output.statistics.engine_time
        if output.error is not None:
            self._close(leg)
            leg.inbox.put_last(Lost(leg, output.error, output.choice_index))
            return
        if not leg.started and not output.withheld_tokens:
            leg.started = True
            self.unstarted_tokens -= leg.uncached_tokens
        if leg.choice_index is not None:
            output.choice_index = leg.choice_index
        if output.finish_reason is not None:
            leg.num_open_choices -= 1
            if leg.num_open_choices <= 0:
                self._close(leg)
        leg.inbox.put(output)

    def _note_taken_back(self, message: Any) -> None:
        leg = self._taken_back[message.handle]
        num_tokens = len(message.token_ids) + message.statistics.candidate_tokens
        leg.num_generated += num_tokens
        leg.computed.num_tokens += num_tokens
        leg.computed.has_begun |= bool(num_tokens) or message.statistics.num_steps > 0
        leg.engine_time += wire.engine_time(message.statistics)
        leg.num_open_choices -= bool(message.finish_reason)
        if message.statistics.num_steps > 0 or message.pooled:
            leg.computed.texts.add(message.choice_index)
        if leg.num_open_choices <= 0 or message.HasField("error"):
            del self._taken_back[message.handle]
            _hear(leg)
            self._stop_if_retired()

    def _set_load(self, load: EngineLoad) -> None:
        self.load = load
        if load.draining and self.state is EngineState.READY:
            self._set_state(EngineState.DRAINING)
        elif not load.draining and self.state is EngineState.DRAINING:
            self._set_state(EngineState.READY)

    def _detach(self) -> None:
        if self.info is not None:
            _log.warning(
                "engine %s (%s) is gone with %d open requests: %s",
                self.info.engine_id,
                self.target,
                len(self._legs),
                self.last_failure,
            )
            self.num_losses += 1
        self.info = None
        self.unstarted_tokens = 0
        lost, self._legs = self._legs, {}
        if self.state is not EngineState.INCOMPATIBLE:
            self._set_state(EngineState.CONNECTING)
        for leg in lost.values():
            leg.inbox.put_last(Lost(leg))
        self._hear_all()
        self._stop_if_retired()

    def _hear_all(self) -> None:
        silent, self._taken_back = self._taken_back, {}
        for leg in silent.values():
            _hear(leg)

    def _set_state(self, state: EngineState) -> None:
        if state is not self.state:
            self.state = state
            self._on_change(self)


def _hear(leg: Leg) -> None:
    """Nothing more is heard of a leg that was taken back."""
    if leg.worked is not None and not leg.worked.done():
        leg.worked.set_result(None)


def _outbox() -> Outbox[engine_pb2.AttachRequest]:
    return Outbox(engine_pb2.AttachRequest.ByteSize)


def _joined(messages: list[engine_pb2.AttachRequest]) -> bytes:
    message = messages[0] if len(messages) == 1 else mailbox.several(messages)
    return message.SerializeToString()
