"""Where a checkpoint's tensors are: headers of safetensors files, read without loading anything. No torch.

Format: eight bytes of header length (little endian), a JSON header of name to {dtype, shape, data_offsets},
then data.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Annotated

import msgspec

from checkpoint.files import is_gguf
from engine.config import EngineConfig
from engine.model.shards import WHOLE, Shard
from engine.model.spec import CheckpointError, ModelSpec, TensorHeader

ELEMENT_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
# A header is a few hundred bytes per tensor; a larger number means that the file is something else.
MAX_HEADER_BYTES = 100_000_000


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint and how it is served."""

    folder: Path
    spec: ModelSpec
    # Serving type.
    dtype: str
    max_model_len: int
    # Says whether weights are quantized, among other things.
    config: EngineConfig = EngineConfig()
    # The part that is read, of whose size `spec` is.
    shard: Shard = WHOLE

    @property
    def float32_precision(self) -> str:
        """Either "highest" or "high": how exact products of float32 are."""
        asked = self.config.float32_matmul_precision
        if asked != "auto":
            return asked
        return "highest" if self.spec.pooling is None else "high"


class StoredTensor(msgspec.Struct):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    # Begin and end in the data.
    data_offsets: tuple[int, int]

    def check(self, name: str) -> None:
        """Raises ValueError where the bytes cannot be those of the elements."""
        begin, end = self.data_offsets
        size = math.prod(self.shape) * ELEMENT_BYTES.get(self.dtype, 0)
        if not 0 <= begin <= end or (self.dtype in ELEMENT_BYTES and end - begin != size):
            raise ValueError(
                f"tensor {name}: data_offsets = [{begin}, {end}] are not those of a {self.dtype} of shape "
                f"{list(self.shape)}"
            )


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint, from one file or from the shards that the index names. A GGUF file's are
    under the names of Hugging Face.
    """
    if is_gguf(folder):
        from engine.model.gguf_file import open_gguf

        return open_gguf(folder).headers
    files = _files(folder)
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, entry in read_stored(folder / file).items():
            if name in headers:
                raise CheckpointError(f"{folder}: tensor {name} is in both {headers[name].file} and {file}")
            headers[name] = TensorHeader(file, entry.dtype, entry.shape)
    return headers


def _files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
        except ValueError as error:
            raise CheckpointError(f"{index} is not a valid index of shards: {error}") from error
        if not shards:
            raise CheckpointError(f"{index} is not a valid index of shards: weight_map names none")
        return sorted(set(shards.values()))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"{folder} holds no *.safetensors and no *.gguf file; other formats are not supported"
        )
    return files


class _Index(msgspec.Struct):
    """`model.safetensors.index.json`: names of tensors to names of files."""

    weight_map: dict[str, str]


def read_stored(path: Path) -> dict[str, StoredTensor]:
    """The tensors in the header of a file that is whole. Raises CheckpointError."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise CheckpointError(
                    f"{path} is a pointer of Git LFS, not the file itself; fetch it with `git lfs pull`"
                )
            (length,) = struct.unpack("<Q", start)
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            raw = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        header = {name: _stored_tensor(name, entry) for name, entry in raw.items()}
        end = max((entry.data_offsets[1] for entry in header.values()), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError(f"cut short: {path.stat().st_size} of {8 + length + end} bytes")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, though the index names it") from error
    except (OSError, ValueError, RecursionError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a whole safetensors file: {error}; copy or download it again"
        ) from error
    return header


def _stored_tensor(name: str, entry: msgspec.Raw) -> StoredTensor:
    try:
        tensor = msgspec.json.decode(entry, type=StoredTensor)
    except msgspec.ValidationError as error:
        raise ValueError(f"tensor {name}: {error}") from error
    tensor.check(name)
    return tensor
