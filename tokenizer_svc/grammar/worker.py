"""A process that compiles grammars and may be killed at any moment.

Reads length-prefixed msgpack from standard input (WorkerSetup once, then WorkRequest after WorkRequest) and
answers on standard output. Its address space is limited after the vocabulary is loaded, so that one grammar
cannot take the machine's memory.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from typing import BinaryIO

import msgspec

from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import BuildLimits, build
from tokenizer_svc.grammar.request import (
    Refused,
    ValidationRequest,
    WorkerReply,
    WorkerSetup,
    WorkRequest,
)
from tokenizer_svc.grammar.validate import validate

# Sent once the worker can take requests.
READY = b"ready"


def write_frame(stream: BinaryIO, payload: bytes) -> None:
    """One message: four bytes of length, little-endian, then the payload."""
    stream.write(len(payload).to_bytes(4, "little") + payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message; None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    return stream.read(int.from_bytes(header, "little"))


def main() -> None:
    """Serves until standard input ends."""
    # The parent stops workers by closing their input; a terminal's Ctrl-C is not for them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    first = read_frame(source)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=WorkerSetup)
    backend = Backend(setup.tokenizer_json, setup.eos_token_ids)
    limits = BuildLimits(max_schema_depth=setup.max_schema_depth, max_artifact_bytes=setup.max_artifact_bytes)
    decoder = msgspec.msgpack.Decoder(WorkRequest)
    encoder = msgspec.msgpack.Encoder()
    _limit_memory(setup.memory_limit_bytes)
    write_frame(sink, READY)
    while (frame := read_frame(source)) is not None:
        try:
            request = decoder.decode(frame)
            if isinstance(request, ValidationRequest):
                reply = validate(request, max_depth=setup.max_schema_depth)
            else:
                reply = build(request, backend, limits)
        except RecursionError:
            reply = WorkerReply(refused=Refused(message="nested too deeply", field="response_format"))
        except Exception:
            message = "the grammar cannot be compiled, for a reason that is in the service's log"
            refused = Refused(message=message, field="response_format")
            reply = WorkerReply(refused=refused, defect=traceback.format_exc())
        except MemoryError:
            # What is left of the heap cannot be relied on; the parent starts another process.
            os._exit(70)
        write_frame(sink, encoder.encode(reply))


def _limit_memory(extra_bytes: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + extra_bytes, used + extra_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
