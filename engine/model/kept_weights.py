"""Keeps a model as it was packed, so that the next start reads it instead of packing it again.

Which file a start may read follows from everything that the packed bytes follow from: the kernels' level,
sources and compiler, the sources that read and pack, the versions of what they stand on, what was asked for,
and the checkpoint's files. Of these the names, sizes and dates of change (of contents and of the file's
entry, which nobody can set) are compared; where dates differ and sizes do not, a digest of all their bytes
decides. So a checkpoint that was copied or touched is found, and one that was written to is not.

The record is a pickle, as it came from the loader: only plain records, specs and arrays are made of it, and
only of files that nobody but their owner could write to.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from checkpoint.files import folder_of, is_gguf
from checkpoint.gguf_parts import part_names
from checkpoint.known import cache_folder
from engine.config import PackedWeightsConfig
from engine.model.checkpoint import LoadRequest
from engine.model.kept_files import (
    SUFFIX,
    CheckpointFile,
    KeptIndex,
    KeptWeight,
    NotKeptError,
    PackedFolder,
    Piece,
    PieceReader,
    PieceWriter,
    WeightsDamagedError,
)
from engine.model.loader import Progress, Received, memory_at, receive_in_subprocess, unpickled
from engine.model.mapped_pages import FilePart, version_of
from engine.model.records import ModelRecord
from engine.model.spec import CheckpointError
from kernels.host import empty
from kernels.linear.packed import Arena, PackedWeight, PackedWeightStruct
from kernels.native.library import NativeLibrary
from runtime.errors import ConfigError, described

_log = logging.getLogger(__name__)

# Packages whose sources decide what is read and how it is packed, and what these stand on.
_SOURCES = ("engine", "kernels", "checkpoint")
_STANDS_ON = ("torch", "numpy", "safetensors", "gguf", "tokenizers")
# What of a checkpoint decides weights: themselves, names and scales beside them, and text for calibration.
_SUFFIXES = frozenset({".safetensors", ".json", ".model"})
_HASHED_BYTES = 4 << 20
# Threads that read: a disk or the system's cache gives no more for further ones.
_READERS = 4
# Nice value of the thread that writes, beside steps that compute.
_NICE = 10


class KeptWeights:
    """The models of one engine. `load` and `write_later` are called in one thread."""

    def __init__(self, config: PackedWeightsConfig) -> None:
        self._config = config
        self._files: PackedFolder | None = None
        if config.max_bytes:
            try:
                self._files = PackedFolder(kept_folder(config), config.max_bytes)
            except ConfigError as error:
                _log.warning("no packed weights are kept, as engine.packed_weights.path is empty: %s", error)
        # What was packed and is not kept yet.
        self._unkept: list[tuple[_Identity, Received]] = []
        self._is_asked = False
        self._writing: threading.Thread | None = None

    def load(self, request: LoadRequest, library: NativeLibrary, progress: Progress) -> ModelRecord:
        """A model for the native kernels: as it is kept, or else by a process that packs it, and then it is
        kept once `write_later` is called. Raises CheckpointError and LoaderLostError.
        """
        identity = None
        if self._files is not None:
            identity = _identity(request, library)
        if identity is not None and (found := self._find(identity, request, library, progress)):
            return found
        received = receive_in_subprocess(request, library, progress)
        if identity is not None and _num_bytes(received) >= self._config.min_bytes:
            self._unkept.append((identity, received))
        return received.record

    def write_later(self) -> threading.Thread | None:
        """Begins to write what was packed, in a thread that ends with the process; returns it."""
        self._is_asked = True
        if not self._unkept:
            return None
        unkept, self._unkept = self._unkept, []
        thread = threading.Thread(target=self._write_all, args=(unkept,), name="keep-weights", daemon=True)
        thread.start()
        self._writing = thread
        return thread

    @property
    def is_settled(self) -> bool:
        """Whether `write_later` was called, and nothing is written any more: weights may change."""
        return self._is_asked and (self._writing is None or not self._writing.is_alive())

    def _find(
        self, identity: _Identity, request: LoadRequest, library: NativeLibrary, progress: Progress
    ) -> ModelRecord | None:
        assert self._files is not None, "asked where something is kept"
        for path in self._candidates(identity, progress):
            begun_s = time.monotonic()
            progress("read packed weights", 0.0)
            try:
                record = _read(path, identity, request, library, progress)
            except FileNotFoundError:
                continue
            except (WeightsDamagedError, OSError) as error:
                # The stage is there to be counted with the seconds of the others.
                progress("drop damaged packed weights", 0.0)
                _log.warning("%s is damaged, dropped and packed again: %s", path, error)
                self._files.remove(path)
                continue
            self._files.use(path)
            _log.info("packed weights read in %.2f s: %s", time.monotonic() - begun_s, path)
            return record
        return None

    def _candidates(self, identity: _Identity, progress: Progress) -> Sequence[Path]:
        """Files that may hold this model, by their names or by the digests of the checkpoint's bytes."""
        assert self._files is not None, "as above"
        place = self._files.root / identity.name
        if os.path.exists(place):
            return (place,)
        digests: tuple[bytes, ...] | None = None
        for kept in self._files.all():
            if not kept.path.name.startswith(identity.shape):
                continue
            try:
                reader = PieceReader(kept.path)
                reader.close()
                if digests is None:
                    progress("compare checkpoint with packed weights", 0.0)
                    digests = tuple(_digest(identity.folder / each.name) for each in identity.files)
                if digests == tuple(each.digest for each in reader.index.files):
                    kept.path.rename(place)
                    return (place,)
            except (OSError, WeightsDamagedError) as error:
                _log.warning("%s cannot be compared: %s", kept.path, error)
        return ()

    def _write_all(self, unkept: Sequence[tuple[_Identity, Received]]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        for identity, received in unkept:
            try:
                self._write(identity, received)
            except NotKeptError as error:
                _log.info("packed weights of %s are not kept: %s", identity.checkpoint, error)
            except OSError as error:
                _log.warning("packed weights of %s are not kept: %s", identity.checkpoint, described(error))

    def _write(self, identity: _Identity, received: Received) -> None:
        assert self._files is not None, "as above"
        if os.path.exists(self._files.root / identity.name):
            # Another engine that began at the same time was faster.
            return
        with self._files.written(identity.name, _num_bytes(received)) as target:
            files = _digested(identity)
            paths = {os.path.realpath(identity.folder / each.name): each.name for each in files}
            mapped = {part.path: paths.get(part.path, "") for part in received.mapped}
            if not all(mapped.values()):
                raise NotKeptError("a table is mapped from another file than the checkpoint's")
            weights = tuple(_write_weight(target, weight) for weight in received.weights)
            target.finish(
                KeptIndex(
                    fingerprint=identity.shape,
                    model=identity.model,
                    files=files,
                    mapped=mapped,
                    weights=weights,
                    arrays=tuple(target.add(array.data) for array in received.arrays),
                    pickled=target.add(received.pickled),
                )
            )
        _log.info(
            "packed weights of %s are kept in %s", identity.checkpoint, self._files.root / identity.name
        )


def kept_folder(config: PackedWeightsConfig) -> Path:
    """Where they are kept. Raises ConfigError where nobody says so."""
    return Path(config.path) if config.path else cache_folder() / "packed"


class _Identity(msgspec.Struct, frozen=True):
    """What a load follows from."""

    checkpoint: Path
    # For people.
    model: str
    # Digest of everything but when files have changed.
    shape: str
    files: tuple[CheckpointFile, ...]

    @property
    def folder(self) -> Path:
        """What names of files are relative to."""
        return folder_of(self.checkpoint)

    @property
    def name(self) -> str:
        """Of the file that holds what was packed."""
        changed = blake2b(msgspec.json.encode([each.changed_ns for each in self.files]), digest_size=8)
        return f"{self.shape}-{changed.hexdigest()}{SUFFIX}"


def _identity(request: LoadRequest, library: NativeLibrary) -> _Identity | None:
    """None where the checkpoint cannot be looked at, of which loading it will speak."""
    config = request.config
    try:
        files = _state(request.folder)
    except OSError:
        return None
    asked = {
        "library": library.path.stem,
        "sources": _sources(),
        "versions": [_version(name) for name in _STANDS_ON],
        "spec": request.spec,
        "shard": request.shard,
        "dtype": request.dtype,
        "max_model_len": request.max_model_len,
        "float32_precision": request.float32_precision,
        "quantize": (config.quantize, config.quantization),
        "kernels": config.kernels,
        "files": [(each.name, each.num_bytes) for each in files],
    }
    digest = blake2b(msgspec.json.encode(asked, order="deterministic"), digest_size=16)
    form = request.dtype if config.quantize == "off" else config.quantize
    model = f"{request.folder}, {form}, {library.level}"
    return _Identity(checkpoint=request.folder, model=model, shape=digest.hexdigest(), files=files)


def _version(package: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _state(checkpoint: Path) -> tuple[CheckpointFile, ...]:
    """The checkpoint's files as they are now. Raises OSError."""
    root = folder_of(checkpoint)
    if is_gguf(checkpoint):
        paths = [root / name for name in part_names(checkpoint.name)]
        paths += [path for path in root.glob("*.json") if path.is_file()]
    else:
        # Folders inside hold what stands behind a pooling; adapters are read by others.
        paths = [
            path
            for pattern in ("*", "*/*")
            for path in root.glob(pattern)
            if path.suffix in _SUFFIXES and path.is_file() and "adapters" not in path.relative_to(root).parts
        ]
    found = []
    for path in sorted(paths):
        status = path.stat()
        changed = status.st_mtime_ns, status.st_ctime_ns
        found.append(CheckpointFile(path.relative_to(root).as_posix(), status.st_size, changed))
    return tuple(found)


def _digested(identity: _Identity) -> tuple[CheckpointFile, ...]:
    """The files with their digests. Raises NotKeptError where they are no longer what was loaded."""
    found = tuple(
        msgspec.structs.replace(each, digest=_digest(identity.folder / each.name)) for each in identity.files
    )
    if _state(identity.checkpoint) != identity.files:
        raise NotKeptError("its files were written to since they were loaded")
    return found


def _digest(path: Path) -> bytes:
    digest = blake2b(digest_size=16)
    with path.open("rb") as file:
        while piece := file.read(_HASHED_BYTES):
            digest.update(piece)
    return digest.digest()


@cache
def _sources() -> str:
    """Digest of the sources that decide what is read and how it is packed."""
    root, digest = Path(__file__).parents[2], blake2b(digest_size=16)
    for package in _SOURCES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _num_bytes(received: Received) -> int:
    weights = sum(sum(weight.sizes.values()) for weight in received.weights)
    return weights + sum(array.nbytes for array in received.arrays) + len(received.pickled)


def _write_weight(target: PieceWriter, weight: PackedWeight) -> KeptWeight:
    parts = {
        part: target.add(memory_at(getattr(weight.struct, part), num_bytes))
        for part, num_bytes in weight.sizes.items()
    }
    return KeptWeight(bytes(weight.struct), parts)


def _read(
    path: Path, identity: _Identity, request: LoadRequest, library: NativeLibrary, progress: Progress
) -> ModelRecord:
    """The model in a file. Raises OSError and WeightsDamagedError."""
    reader = PieceReader(path)
    try:
        index = reader.index
        if index.fingerprint != identity.shape:
            raise WeightsDamagedError("it lies under another one's name")
        arena, rooms = Arena(library), _Rooms(reader, progress)
        weights = [_place_weight(kept, arena, rooms) for kept in index.weights]
        arrays: list[NDArray[np.uint8]] = [empty((piece.num_bytes,), np.uint8) for piece in index.arrays]
        pickled = bytearray(index.pickled.num_bytes)
        for piece, array in zip(index.arrays, arrays, strict=True):
            rooms.add(piece, array.data)
        rooms.add(index.pickled, memoryview(pickled))
        rooms.fill()
    finally:
        reader.close()
    try:
        return unpickled(pickled, weights, arrays, place=_placing(index.mapped, identity.folder))
    except CheckpointError:
        raise
    except Exception as error:
        # Its bytes are those that were written; who wrote them had other classes in mind.
        raise WeightsDamagedError(f"its record cannot be read: {error}") from error


class _Rooms:
    """Memory that is filled from a file, by several threads."""

    def __init__(self, reader: PieceReader, progress: Progress) -> None:
        self._reader = reader
        self._progress = progress
        self._wanted: list[tuple[Piece, memoryview]] = []

    def add(self, piece: Piece, room: memoryview) -> None:
        """`room` has the piece's bytes."""
        self._wanted.append((piece, room))

    def fill(self) -> None:
        """Reads everything. Raises what reading raises."""
        total, done = sum(piece.num_bytes for piece, _ in self._wanted) or 1, 0
        with ThreadPoolExecutor(_READERS, "read-weights") as threads:
            reading = [
                (piece, threads.submit(self._reader.read, piece, room)) for piece, room in self._wanted
            ]
            try:
                for piece, each in reading:
                    each.result()
                    done += piece.num_bytes
                    self._progress("read packed weights", done / total)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise


def _place_weight(kept: KeptWeight, arena: Arena, rooms: _Rooms) -> PackedWeight:
    try:
        struct: Any = PackedWeightStruct.from_buffer_copy(kept.described)
    except ValueError as error:
        raise WeightsDamagedError(f"a weight is described by {len(kept.described)} bytes") from error
    sizes: Mapping[str, int] = {part: piece.num_bytes for part, piece in kept.parts.items()}
    for part, piece in kept.parts.items():
        address = arena.take(piece.num_bytes)
        setattr(struct, part, address)
        rooms.add(piece, memory_at(address, piece.num_bytes))
    return PackedWeight(struct, arena, sizes)


def _placing(mapped: Mapping[str, str], folder: Path) -> Callable[[FilePart], FilePart]:
    """Where parts of the checkpoint's files are now, which may be another copy."""

    def place(part: FilePart) -> FilePart:
        path = os.path.realpath(folder / mapped[part.path])
        return FilePart(path, part.offset, version_of(os.stat(path)))

    return place
