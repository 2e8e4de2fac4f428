"""Messages between front and core process, as tagged plain data, and the core's end of their socket pair."""

from __future__ import annotations

import socket
import threading
from queue import Empty, Queue
from typing import Any

import msgspec

from contract.frames import FrameBuffer, framed
from engine.config import EngineConfig
from engine.types import (
    NOT_MEASURED,
    FinishReason,
    KvEvent,
    MeasuredSpeed,
    MemoryPlan,
    MemoryUse,
    ModelFacts,
    Request,
    RequestFailure,
    SchedulerLoad,
    TokenEvent,
)
from engine.types.experts import ExpertSpread
from runtime.config import ModelConfig

_CHUNK_BYTES = 1 << 20
# Chunks that wait for the core at most.
_MOST_PIECES = 64

# Front to core.


class Start(msgspec.Struct, frozen=True, tag="start"):
    """First message: what to load."""

    config: EngineConfig
    model: ModelConfig
    # checkpoint.vocabulary.TokenIds as plain data, for a core that cannot read them.
    token_ids: dict[str, Any] = {}
    # checkpoint.pooling.PoolingFiles as plain data, for such a core; None where the model generates.
    pooling: dict[str, Any] | None = None


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    """A request, already validated."""

    request: Request


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ends a request without an error. Unknown and ended requests are ignored."""

    request_id: int
    reason: FinishReason = FinishReason.CANCELLED


class Fail(msgspec.Struct, frozen=True, tag="fail"):
    """Ends a request with an error."""

    request_id: int
    failure: RequestFailure


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Lets go blocks that are held for another engine; see Request.hand_over."""

    ticket: bytes


class Check(msgspec.Struct, frozen=True, tag="check"):
    """Asks for the state of the books between two steps."""

    token: int


class AddAdapter(msgspec.Struct, frozen=True, tag="add_adapter"):
    """Asks for an adapter to be served, by its version; answered by AdapterAdded."""

    token: int
    name: str
    folder: str


class DropAdapter(msgspec.Struct, frozen=True, tag="drop_adapter"):
    """No further request asks for an adapter."""

    name: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Asks the core to end."""


Command = Start | Submit | Cancel | Fail | Release | Check | AddAdapter | DropAdapter | Stop

# Core to front.


class LoadProgress(msgspec.Struct, frozen=True, tag="progress"):
    """A stage of start-up and the part of it that is done."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The runner is loaded and has taken its first steps."""

    memory: MemoryPlan
    facts: ModelFacts
    # Seconds of each stage of start-up, by name.
    stages_s: dict[str, float] = {}
    speed: MeasuredSpeed = NOT_MEASURED


class CoreRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Start-up failed for a reason that the operator can mend."""

    message: str


class StepTotals(msgspec.Struct, frozen=True, kw_only=True):
    """Size and duration of the steps that ended since the last report; for metrics."""

    # "prefill", "decode", "mixed" or "failed".
    kind: str
    num_tokens: int
    num_sequences: int
    # The time that forward and sampling took.
    seconds: float
    # See StepResult.
    num_halvings: int = 0
    saved_s: float = 0.0
    spent_s: float = 0.0
    # Operations and bytes of the step by the model's shapes; see engine.types.step.
    flop: float = 0.0
    read_bytes: float = 0.0


class StepDone(msgspec.Struct, frozen=True, tag="step"):
    """Everything that happened in one step, or the load alone when idle."""

    step_id: int
    events: list[TokenEvent]
    kv_events: tuple[KvEvent, ...]
    load: SchedulerLoad
    totals: tuple[StepTotals, ...] = ()
    # Measured use of the memory plan's parts; sent now and then.
    memory: MemoryUse | None = None
    # Steps that failed as a whole since the last report.
    num_failed_steps: int = 0
    # Where ranks have some experts each; sent with memory's use.
    experts: ExpertSpread | None = None


class Checked(msgspec.Struct, frozen=True, tag="checked"):
    """Answer to Check. `violation` is empty when everything adds up."""

    token: int
    violation: str
    num_unreferenced_blocks: int
    num_total_blocks: int
    num_requests: int
    num_runner_states: int


class AdapterAdded(msgspec.Struct, frozen=True, tag="adapter_added"):
    """Answer to AddAdapter. `problem` is empty when it is served from now on."""

    token: int
    problem: str


class AdaptersLoaded(msgspec.Struct, frozen=True, tag="adapters_loaded"):
    """Other adapters than before are in memory."""

    names: tuple[str, ...]


class Broken(msgspec.Struct, frozen=True, tag="broken"):
    """The runner is lost; every request was ended with STEP_FAILED and the core ends."""

    cause: str


Report = LoadProgress | Ready | CoreRefused | StepDone | Checked | AdapterAdded | AdaptersLoaded | Broken


class PeerGone(Exception):
    """The other side closed the socket."""


def encode(message: Command | Report) -> bytes:
    """The frame of a message."""
    return framed(msgspec.msgpack.encode(message))


class CoreSocket:
    """The core's end. A thread reads, also while a step is computed: the socket holds a few long prompts, and
    who stands behind them would wait for one step more each time that it is full. It has the interpreter for
    moments only, as messages are decoded by whoever receives them.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = FrameBuffer()
        self._decoder = msgspec.msgpack.Decoder(Command)
        # Pieces as they came; an empty one is the end. Where nobody takes them, the front's own limit holds.
        self._pieces: Queue[bytes] = Queue(_MOST_PIECES)
        threading.Thread(target=self._read, name="read-commands", daemon=True).start()

    def _read(self) -> None:
        data = b"?"
        while data:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except OSError:
                data = b""
            self._pieces.put(data)

    def receive(self, timeout_s: float) -> list[Command]:
        """Messages that are there, waiting up to `timeout_s` for the first piece. Raises PeerGone at
        the end.
        """
        messages: list[Command] = []
        try:
            data = self._pieces.get(timeout_s > 0, timeout_s)
            while data:
                messages += [self._decoder.decode(payload) for payload in self._buffer.feed(data)]
                data = self._pieces.get_nowait()
        except Empty:
            return messages
        self._pieces.put(data)
        if not messages:
            raise PeerGone
        return messages

    def send(self, message: Report) -> None:
        """Writes one message. Raises PeerGone when nobody reads any more."""
        try:
            self._socket.sendall(encode(message))
        except ConnectionError as error:
            raise PeerGone from error
