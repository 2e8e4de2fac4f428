"""A process that compiles grammars and prepares large prompts, and may be killed at any moment.

The first one reads a WorkerSetup from the socket that is its standard input, loads the vocabulary, and from
then on makes a copy of itself for every socket that it is sent, telling the copy's process number. Copies
read length-prefixed msgpack (WorkRequest after WorkRequest) and answer in the same way. The address space of
a copy is limited, so that one grammar cannot take the machine's memory.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import time
import traceback
from io import BufferedIOBase, RawIOBase
from typing import BinaryIO

import msgspec

from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import BuildLimits, build
from tokenizer_svc.grammar.courtesy import Courtesy
from tokenizer_svc.grammar.request import (
    PromptRequest,
    Refused,
    ValidationRequest,
    WorkerReply,
    WorkerSetup,
    WorkRequest,
)
from tokenizer_svc.grammar.validate import validate
from tokenizer_svc.large import prepare
from tokenizer_svc.prompt import Prompts

# Sent once workers can be made.
READY = b"ready"
# Encodings of turns that a worker keeps, in tokens.
_TURN_CACHE_TOKENS = 1024 * 1024


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """One message: four bytes of length, little-endian, then the payload."""
    stream.write(len(payload).to_bytes(4, "little"))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BufferedIOBase | RawIOBase) -> bytearray | None:
    """The next message; None at the end of the stream."""
    header = _read(stream, 4)
    return None if header is None else _read(stream, int.from_bytes(header, "little"))


def _read(stream: BufferedIOBase | RawIOBase, num_bytes: int) -> bytearray | None:
    """So many bytes; None where the stream ends before."""
    found = bytearray(num_bytes)
    rest = memoryview(found)
    while rest:
        num_read = stream.readinto(rest)
        if not num_read:
            return None
        rest = rest[num_read:]
    return found


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
    # Threads do not survive being copied, and one tenant's prompt is not worth all cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    setup = WorkerSetup.decoded(first)
    backend = Backend(setup.checkpoint.tokenizer_json, setup.checkpoint.eos_token_ids)
    prompts = Prompts(setup.checkpoint, setup.limits, turn_cache_tokens=_TURN_CACHE_TOKENS)
    # Copies as well: whoever asks is not interrupted by the worker that it has just woken.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # Copies share what is not touched.
    gc.collect()
    gc.freeze()
    control.sendall(READY)
    while True:
        data, handles, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _serve(socket.socket(fileno=handles[0]), setup, backend, prompts)
            os._exit(0)
        os.close(handles[0])
        control.sendall(pid.to_bytes(4, "little"))


def _serve(connection: socket.socket, setup: WorkerSetup, backend: Backend, prompts: Prompts) -> None:
    source, sink = connection.makefile("rb"), connection.makefile("wb")
    limits = BuildLimits(
        max_schema_depth=setup.limits.max_schema_depth, max_artifact_bytes=setup.limits.max_artifact_bytes
    )
    decoder = msgspec.msgpack.Decoder(WorkRequest)
    encoder = msgspec.msgpack.Encoder()
    courtesy = Courtesy()
    _limit_memory(setup.memory_limit_bytes)
    while (frame := read_frame(source)) is not None:
        began_s = time.process_time()
        try:
            with courtesy:
                request = decoder.decode(frame)
                if isinstance(request, ValidationRequest):
                    reply = validate(request, max_depth=setup.limits.max_schema_depth)
                elif isinstance(request, PromptRequest):
                    reply = prepare(request, prompts, max_tool_bytes=setup.limits.max_grammar_bytes)
                else:
                    reply = build(request, backend, limits)
        except RecursionError:
            reply = WorkerReply(refused=Refused(message="nested too deeply", field="response_format"))
        except Exception:
            message = "this cannot be prepared, for a reason that is in the service's log"
            refused = Refused(message=message, field="response_format")
            reply = WorkerReply(refused=refused, defect=traceback.format_exc())
        except MemoryError:
            # What is left of the heap cannot be relied on; the parent starts another process.
            os._exit(70)
        used_s = time.process_time() - began_s
        write_frame(sink, encoder.encode(msgspec.structs.replace(reply, processor_s=used_s)))


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
