"""Where a checkpoint's tensors are: headers of safetensors files, read without loading anything. No torch.

Format: eight bytes of header length (little endian), a JSON header of name to {dtype, shape, data_offsets},
then data.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import msgspec

from engine.model.spec import CheckpointError

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


class TensorHeader(msgspec.Struct, frozen=True):
    """One stored tensor."""

    file: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


def resolve_checkpoint(path: str) -> Path:
    """The folder of a checkpoint: a directory, or a hub id that is downloaded. Raises CheckpointError."""
    folder = Path(path)
    if folder.is_dir():
        return folder
    if path.count("/") != 1 or path.startswith((".", "/")):
        raise CheckpointError(
            f"model.path = {path!r}: no such directory, and it is not a hub id (owner/name)"
        )
    import huggingface_hub

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
        return Path(huggingface_hub.snapshot_download(path, allow_patterns=patterns))
    except Exception as error:
        raise CheckpointError(
            f"model.path = {path!r}: no such directory, and downloading it from the hub failed ({error}); "
            "give the path of a local checkpoint"
        ) from error


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Every tensor of a checkpoint, from one file or from the shards that the index names."""
    files = _files(folder)
    headers: dict[str, TensorHeader] = {}
    for file in files:
        for name, entry in _read_header(folder / file).items():
            if name in headers:
                raise CheckpointError(f"{folder}: tensor {name} is in both {headers[name].file} and {file}")
            headers[name] = TensorHeader(file, entry["dtype"], tuple(entry["shape"]))
    return headers


def _files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{index} is not a valid index of shards: {error!r}") from error
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file; other formats are not supported")
    return files


def _read_header(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"header of {length} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError(f"cut short: {path.stat().st_size} of {8 + length + end} bytes")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing, though the index names it") from error
    except (ValueError, struct.error, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    return header
