"""A process that compiles grammars and prepares large prompts, and may be killed at any moment.

The first one reads a WorkerSetup from the socket that is its standard input, loads the vocabulary, and from
then on makes a copy of itself for every socket that it is sent, telling the copy's process number. Copies
read length-prefixed msgpack (WorkRequest after WorkRequest) and answer in the same way, once they have said
by an empty message that they are ready. The address space of a copy is limited, so that one grammar cannot
take the machine's memory.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable

import msgspec
from google.protobuf.message import DecodeError

from contract.chat import JsonSchemaFormat
from contract.errors import MillraceError, Reason
from contract.frames import framed, read_frame
from runtime.memory import give_back, one_heap
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import (
    GrammarRequest,
    PromptRequest,
    ValidationRequest,
    WorkerReply,
    WorkerSetup,
    WorkRefusal,
    WorkRequest,
)
from tokenizer_svc.grammar.validate import validate
from tokenizer_svc.messages.wire import NO_REQUEST, packed_ids, parse_request
from tokenizer_svc.prompt.prompts import Prompts
from tokenizer_svc.workers.yielding import Yielding

# Sent once workers can be made.
READY = b"ready"
# The request for a copy: of ordinary priority, or of the lowest from its first instruction.
ORDINARY, LOWEST = b"+", b"-"
# Niceness of work that gives way to everything of ordinary priority.
NICENESS = 15
# Encodings of turns that a worker keeps, in tokens.
_TURN_CACHE_TOKENS = 1024 * 1024
# A schema that runs through most of the compiler. Each copy builds it once before its first job, because
# memory that is written for the first time after a fork has to be copied page by page.
_REHEARSAL = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "kind": {"enum": ["one", "two"]},
        "number": {"type": "integer", "minimum": 0, "maximum": 30},
        "either": {"oneOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]},
    },
    "required": ["name"],
    "additionalProperties": False,
}


def main() -> None:
    """Serves until the control socket ends."""
    # Processes are stopped by closing their sockets; a terminal's Ctrl-C is not for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Copies that end leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    with control.makefile("rb", buffering=0) as source:
        first = read_frame(source)
    if first is None:
        return
    one_heap()
    # Threads do not survive being copied, and one tenant's prompt is not worth all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    setup = WorkerSetup.decoded(first)
    backend = None
    if setup.checkpoint.pooled is None:
        backend = Backend(setup.checkpoint.tokenizer_json, setup.checkpoint.eos_token_ids)
    prompts = Prompts(setup.checkpoint, setup.limits, turn_cache_tokens=_TURN_CACHE_TOKENS)
    desk = Desk(setup, backend, prompts)
    desk.rehearse()
    memory_limit_bytes = _address_space() + setup.memory_limit_bytes
    # Copies as well: whoever asks is not interrupted by the worker that it has just woken.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Copies share what is not touched.
    gc.collect()
    gc.freeze()
    give_back()
    control.sendall(READY)
    while True:
        kind, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not kind:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(socket.socket(fileno=handles[0]), desk, memory_limit_bytes, lowest=kind == LOWEST)
            os._exit(0)
        os.close(handles[0])
        control.sendall(pid.to_bytes(4, "little"))


class Desk:
    """All that a worker works with. Made before it is copied: each page that a copy writes to for the first
    time costs it as much as a page's copy.
    """

    def __init__(self, setup: WorkerSetup, backend: Backend | None, prompts: Prompts) -> None:
        """`backend` is None for a model that pools: nothing is generated that a grammar could hold."""
        self._limits = setup.limits
        self._backend = backend
        self._prompts = prompts
        self._decoder = msgspec.msgpack.Decoder(WorkRequest)
        self._encoder = msgspec.msgpack.Encoder()
        self._yielding = Yielding()

    def rehearse(self) -> None:
        """Does what most requests ask for, so that the first one is as fast as the next."""
        form = JsonSchemaFormat(json.dumps(_REHEARSAL))
        self.reply(msgspec.msgpack.encode(GrammarRequest(response_format=form)))

    def reply(self, frame: bytes | bytearray) -> bytes:
        """The encoded WorkerReply to one encoded WorkRequest."""
        began_s = time.process_time()
        try:
            with self._yielding:
                reply = self._reply(self._decoder.decode(frame))
        except RecursionError:
            reply = WorkerReply(refused=WorkRefusal(message="nested too deeply", field="response_format"))
        except Exception:
            message = "this cannot be prepared, for a reason that is in the service's log"
            refused = WorkRefusal(message=message, field="response_format")
            reply = WorkerReply(refused=refused, defect=traceback.format_exc())
        except MemoryError:
            # The heap may be inconsistent after a failed allocation, so the parent starts another process.
            os._exit(70)
        used_s = time.process_time() - began_s
        return self._encoder.encode(msgspec.structs.replace(reply, processor_s=used_s))

    def _reply(self, request: WorkRequest) -> WorkerReply:
        if isinstance(request, ValidationRequest):
            return validate(request, max_depth=self._limits.max_schema_depth)
        if isinstance(request, PromptRequest):
            return self._prepared(request)
        if self._backend is None:
            message = "the model generates nothing that a grammar could hold; leave it out"
            return WorkerReply(refused=WorkRefusal(message=message, field="response_format"))
        return build(request, self._backend, self._limits)

    def _prepared(self, request: PromptRequest) -> WorkerReply:
        try:
            prompted = self._prompts.prepared(parse_request(request.wire), request)
        except DecodeError:
            return WorkerReply(
                refused=WorkRefusal(message=NO_REQUEST, field="", reason=Reason.MALFORMED_BODY)
            )
        except MillraceError as error:
            refused = WorkRefusal(
                message=error.message, field=error.field, reason=error.reason, metadata=error.metadata
            )
            return WorkerReply(refused=refused)
        ids = prompted.token_ids
        assert not isinstance(ids, memoryview), "packed here"
        return WorkerReply(prompted=msgspec.structs.replace(prompted, token_ids=memoryview(packed_ids(ids))))


def _serve(connection: socket.socket, desk: Desk, memory_limit_bytes: int, *, lowest: bool) -> None:
    if lowest:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        _at_low_priority(desk.rehearse)
    resource.setrlimit(resource.RLIMIT_AS, (memory_limit_bytes, memory_limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source = connection.makefile("rb")
    connection.sendall(framed(b""))
    while (frame := read_frame(source)) is not None:
        connection.sendall(framed(desk.reply(frame)))


def _at_low_priority(work: Callable[[], None]) -> None:
    """Does the work at a low priority, which cannot be undone and so is a thread's, not the process's."""

    def gently() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        # See Yielding: the signal is for whoever computes.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        work()

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    thread = threading.Thread(target=gently)
    thread.start()
    thread.join()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})


def _address_space() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    main()
