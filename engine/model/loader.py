"""Loads a model for the native kernels, in this process or in one of its own.

Reading, converting, quantizing and calibrating weights takes torch, and serving them does not. So the
engine's core has it done by a process (`load_in_subprocess`) that packs one linear layer after the other,
hands each over a connection, and ends: of torch, whose libraries and modules take 190 MiB, nothing is left
when requests come. The core holds the packed weights alone, on huge pages of its own; the loader holds one
layer.

What is sent: tuples of a kind and what belongs to it, and behind them the bytes that they count;
`kept_weights` keeps the same on disk.
"""

from __future__ import annotations

import argparse
import ctypes
import enum
import io
import logging
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.model.checkpoint import LoadRequest
from engine.model.mapped_pages import FilePart, file_of, version_of
from engine.model.records import Linear, ModelRecord, host_arrays
from engine.model.spec import CheckpointError
from kernels.host import empty
from kernels.linear.packed import Arena, PackedWeight, PackedWeightStruct
from kernels.native.library import NativeLibrary, load_level
from runtime.errors import ConfigError
from runtime.memory import keep_freed_memory, one_heap

if TYPE_CHECKING:
    from kernels.linear.native import NativePacker

_log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
_PROGRESS, _WEIGHT, _MODEL, _REFUSED = range(4)
# A connection holds a message a second time while it receives it.
_PIECE_BYTES = 4 << 20
_PR_SET_PDEATHSIG = 1


class LoaderLostError(Exception):
    """The process that loads ended without a word; the log has what it said."""


def load_here(request: LoadRequest, library: NativeLibrary, progress: Progress) -> ModelRecord:
    """Loads with this process's torch. Raises CheckpointError."""
    from engine.model.reading import NativePacking

    packing = NativePacking(_packer(request, library))
    return _load(request, packing, progress)


def _packer(request: LoadRequest, library: NativeLibrary) -> NativePacker:
    from kernels.linear.native import NativePacker

    return NativePacker(
        library, num_threads=request.config.num_threads, half_pairs=request.float32_precision == "high"
    )


@dataclass(frozen=True)
class Received:
    """A model and what it was made of: its pickle, and what that refers to."""

    record: ModelRecord
    pickled: bytes
    weights: Sequence[PackedWeight]
    arrays: Sequence[NDArray[np.uint8]]
    # Parts of the checkpoint's files that the record maps.
    mapped: Sequence[FilePart]


def load_in_subprocess(request: LoadRequest, library: NativeLibrary, progress: Progress) -> ModelRecord:
    """As `load_here`, by a process that is gone afterwards. Raises LoaderLostError, too."""
    return receive_in_subprocess(request, library, progress).record


def receive_in_subprocess(request: LoadRequest, library: NativeLibrary, progress: Progress) -> Received:
    """The same, for those who keep what was packed."""
    ours, theirs = Pipe()
    flags = ("-P",) if sys.flags.safe_path else ()
    level = logging.getLevelName(_log.getEffectiveLevel()).lower()
    arguments = ("-m", "engine.model.loader", "--fd", str(theirs.fileno()), "--log-level", level)
    process = subprocess.Popen(
        [sys.executable, *flags, *arguments], pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL
    )
    theirs.close()
    try:
        with ours:
            ours.send((library.level, request))
            return _receive_model(ours, library, progress)
    except (OSError, EOFError) as error:
        status = process.wait()
        why = (
            ": killed, as systems do when memory ends; see millrace plan" if status == -signal.SIGKILL else ""
        )
        raise LoaderLostError(
            f"the process that loads {request.folder} ended (exit code {status}{why})"
        ) from error
    finally:
        process.kill()
        process.wait()


def _load(request: LoadRequest, packing: Any, progress: Progress) -> ModelRecord:
    import torch

    from engine.model.reading import read_checkpoint
    from kernels.selection import choose_kernels

    if request.spec.dtype == "float16" and request.dtype == "bfloat16":
        _log.info("float16 weights are %s", "kept" if packing.keeps_float16 else "rounded to bfloat16")
    device = torch.device("cpu")
    kernels = choose_kernels(request.config.kernels, device)
    packed: ModelRecord = host_arrays(
        read_checkpoint(request, device=device, progress=progress, kernels=kernels, packing=packing)
    )
    return packed


# The core's end.


def _receive_model(connection: Connection, library: NativeLibrary, progress: Progress) -> Received:
    arena = Arena(library)
    weights: list[PackedWeight] = []
    mapped: list[FilePart] = []

    def note(part: FilePart) -> FilePart:
        mapped.append(part)
        return part

    while True:
        kind, *message = connection.recv()
        if kind == _PROGRESS:
            progress(*message)
        elif kind == _WEIGHT:
            weights.append(_receive_weight(connection, arena, *message))
        elif kind == _REFUSED:
            is_checkpoint, text = message
            raise (CheckpointError if is_checkpoint else ConfigError)(text)
        else:
            pickled, sizes = message
            arrays = []
            for num_bytes in sizes:
                arrays.append(empty((num_bytes,), np.uint8))
                _receive_into(connection, arrays[-1].data)
            record = unpickled(pickled, weights, arrays, place=note)
            return Received(record, pickled, weights, arrays, mapped)


def _receive_weight(
    connection: Connection, arena: Arena, described: bytes, sizes: dict[str, int]
) -> PackedWeight:
    weight = PackedWeightStruct.from_buffer_copy(described)
    for part, num_bytes in sizes.items():
        address = arena.take(num_bytes)
        setattr(weight, part, address)
        _receive_into(connection, memory_at(address, num_bytes))
    return PackedWeight(weight, arena, sizes)


def _receive_into(connection: Connection, room: memoryview) -> None:
    done = 0
    while done < len(room):
        done += connection.recv_bytes_into(room[done:])


def unpickled(
    pickled: bytes | bytearray,
    weights: Sequence[PackedWeight],
    arrays: Sequence[NDArray[np.uint8]],
    *,
    place: Callable[[FilePart], FilePart],
) -> ModelRecord:
    """The record that `_Pickler` has written, with weights and arrays in their places; `place` says where a
    part of a file is now. Raises CheckpointError where that is not what it was.
    """
    found = _Unpickler(io.BytesIO(pickled), weights, arrays, place).load()
    assert isinstance(found, ModelRecord)
    return found


_OWN_PACKAGES = ("engine", "kernels", "checkpoint", "contract", "runtime")
_MODULES = (*_OWN_PACKAGES, "msgspec", "numpy", "pathlib")
# Functions by which arrays and msgspec's structs are made of what a pickle holds.
_MAKERS = {
    ("msgspec._utils", "rebuild"),
    ("numpy._core.numeric", "_frombuffer"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "scalar"),
    ("pathlib", "PosixPath"),
}


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        source: io.BytesIO,
        weights: Sequence[PackedWeight],
        arrays: Sequence[NDArray[np.uint8]],
        place: Callable[[FilePart], FilePart],
    ) -> None:
        super().__init__(source, buffers=arrays)
        self._weights = weights
        self._place = place

    def find_class(self, module: str, name: str) -> Any:
        """Nothing but plain data is made, whatever the pickle names."""
        found = super().find_class(module, name) if module.partition(".")[0] in _MODULES else None
        if (module, name) in _MAKERS or (isinstance(found, type) and _is_plain(found)):
            return found
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a record")

    def persistent_load(self, name: tuple[Any, ...]) -> Any:
        if name[0] == "weight":
            return self._weights[name[1]]
        _, part, dtype, shape = name
        return _map_array(self._place(part), dtype, shape)


def _is_plain(kind: type) -> bool:
    own = kind.__module__.partition(".")[0] in _OWN_PACKAGES
    return own and (is_dataclass(kind) or issubclass(kind, msgspec.Struct | enum.Enum | tuple))


def _map_array(part: FilePart, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """An array in a file, whose pages are read when they are looked at. Raises CheckpointError where the file
    is not what it was.
    """
    begin = part.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    count = math.prod(shape)
    try:
        with Path(part.path).open("rb") as file:
            if version_of(os.fstat(file.fileno())) != part.version:
                raise CheckpointError(f"{part.path} was replaced or written to during the load; start again")
            size = part.offset - begin + count * np.dtype(dtype).itemsize
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=begin)
    except OSError as error:
        raise CheckpointError(f"{part.path} cannot be opened a second time: {error}") from error
    return np.frombuffer(mapped, dtype, count, part.offset - begin).reshape(shape)


# The loader's end.


class _HandingOver:
    """Packs a linear layer at a time, and keeps none."""

    def __init__(self, packer: Callable[[], NativePacker], connection: Connection) -> None:
        self._packer = packer
        self._connection = connection
        self._none = packer()
        self.keeps_float16 = self._none.keeps_float16
        # Handed over ones, whose memory is gone, to their numbers.
        self.numbers: dict[int, int] = {}
        self._handed: list[PackedWeight] = []

    def pack(self, linear: Linear) -> None:
        """Packs weight and bias of a layer, and lets them go."""
        from kernels.linear.native import packed_by

        linear.weight = packed_by(self._hand_over, linear.weight, linear.bias)
        linear.bias = linear.product = None

    def _hand_over(self, weight: Any, bias: Any) -> PackedWeight:
        packed = self._packer().pack(weight, bias)
        self._connection.send((_WEIGHT, bytes(packed.struct), packed.sizes))
        for part, num_bytes in packed.sizes.items():
            _send_from(self._connection, memory_at(getattr(packed.struct, part), num_bytes))
        handed = PackedWeight(packed.struct, self._none.arena, packed.sizes)
        self.numbers[id(handed)] = len(self._handed)
        self._handed.append(handed)
        return handed


class _Pickler(pickle.Pickler):
    def __init__(self, target: io.BytesIO, numbers: dict[int, int]) -> None:
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(target, protocol=5, buffer_callback=self.buffers.append)
        self._numbers = numbers

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if isinstance(value, PackedWeight):
            return ("weight", self._numbers[id(value)])
        if isinstance(value, np.ndarray) and (part := file_of(value.ctypes.data, value.nbytes)):
            return ("file", part, value.dtype.str, value.shape)
        return None


def _serve(connection: Connection) -> None:
    """Answers one request."""
    level, request = connection.recv()
    import torch

    one_heap()
    keep_freed_memory()
    torch.set_num_threads(request.config.num_threads)
    library = load_level(level)
    packing = _HandingOver(lambda: _packer(request, library), connection)
    reported: list[tuple[str, float]] = []

    def progress(stage: str, fraction: float) -> None:
        if not reported or stage != reported[-1][0] or fraction >= min(1.0, reported[-1][1] + 0.01):
            reported.append((stage, fraction))
            connection.send((_PROGRESS, stage, fraction))

    try:
        model = _load(request, packing, progress)
    except ConfigError as error:
        connection.send((_REFUSED, isinstance(error, CheckpointError), str(error)))
        return
    target = io.BytesIO()
    pickler = _Pickler(target, packing.numbers)
    pickler.dump(model)
    raw = [buffer.raw() for buffer in pickler.buffers]
    connection.send((_MODEL, target.getvalue(), [len(each) for each in raw]))
    for each in raw:
        _send_from(connection, each)


def _send_from(connection: Connection, memory: memoryview) -> None:
    for start in range(0, len(memory), _PIECE_BYTES):
        connection.send_bytes(memory[start : start + _PIECE_BYTES])


def memory_at(address: int, num_bytes: int) -> memoryview:
    """The bytes there, to be read and written while they are allocated."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


def main() -> int:
    """Loads what is asked for over the socket."""
    parser = argparse.ArgumentParser(prog="python -m engine.model.loader", description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the core")
    parser.add_argument("--log-level", default="info")
    arguments = parser.parse_args()
    # As in the core, the front decides when this ends; and without its core it has nobody to load for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    from observability.emit import logging as json_logging

    json_logging.configure("engine-loader", arguments.log_level)
    with Connection(arguments.fd) as connection:
        try:
            _serve(connection)
        except (ConnectionError, EOFError):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
