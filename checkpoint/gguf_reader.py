"""Headers and metadata of GGUF files, by the `gguf` package; a vocabulary is read in one go."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import gguf
from gguf import GGUFEndian, GGUFValueType

from runtime.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# A string follows its length.
_LENGTH_BYTES = 8


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Raises ConfigError for what is no whole GGUF file."""
    try:
        return _HeaderReader(path)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"{path} is not a whole GGUF file: {error}; copy or download it again") from error


def contents(path: Path, field: Any) -> Any:
    """The value of a field of the file's metadata. Raises ConfigError."""
    try:
        return field.contents()
    except (ValueError, IndexError) as error:
        raise ConfigError(
            f"{path}: {field.name} cannot be read: {error}; copy or download the file again"
        ) from error


class _HeaderReader(gguf.GGUFReader):
    """The package makes an array object, and three on the way to it, of each of a vocabulary's hundreds of
    thousands of elements. Here a list of numbers is one array, and strings are parts of the file's memory.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if GGUFValueType(raw_type) is not GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        memory = memoryview(cast("Buffer", self.data))
        order: Literal["little", "big"] = "little" if self.endianess == GGUFEndian.LITTLE else "big"
        item = GGUFValueType(int.from_bytes(memory[orig_offs : orig_offs + 4], order))
        count, start = int.from_bytes(memory[orig_offs + 4 : orig_offs + 12], order), orig_offs + 12
        number = self.gguf_scalar_to_np.get(item)
        types = [GGUFValueType.ARRAY, item]
        if number is not None:
            size = count * number().itemsize
            self._check(start + size)
            return 12 + size, [self._get(start, number, count)], [0] if count else [], types
        if item is not GGUFValueType.STRING:
            return super()._get_field_parts(orig_offs, raw_type)
        parts: list[Any] = []
        at = start
        for _ in range(count):
            begin = at + _LENGTH_BYTES
            self._check(begin)
            at = begin + int.from_bytes(memory[at:begin], order)
            self._check(at)
            parts.append(memory[begin:at])
        return at - orig_offs, parts, list(range(count)), types

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        # The package's own errors name neither the tensor nor what is wrong with it.
        for field in fields:
            _, name_data, _, dims, raw_type, offset = field.parts
            self._check_tensor(
                str(bytes(name_data), "utf-8", "replace"),
                dims.tolist(),
                int(raw_type[0]),
                start_offs + int(offset[0]),
            )
        super()._build_tensors(start_offs, fields)

    def _check_tensor(self, name: str, dims: list[int], raw_type: int, start: int) -> None:
        """`dims`: numbers of a row first. Raises ValueError."""
        sizes = gguf.GGML_QUANT_SIZES
        kind = next((kind for kind in sizes if kind.value == raw_type), None)
        if kind is None:
            raise ValueError(f"tensor {name} has the type {raw_type}, which is not known here")
        block, num_bytes = sizes[kind]
        if dims and dims[0] % block:
            raise ValueError(
                f"tensor {name} has rows of {dims[0]} numbers, and {kind.name} has blocks of {block}"
            )
        end = start + math.prod(dims) // block * num_bytes
        if end > len(self.data):
            raise ValueError(f"tensor {name} is cut short: it ends at {end} of {len(self.data)} bytes")

    def _check(self, end: int) -> None:
        if end > len(self.data):
            raise ValueError(f"cut short: {len(self.data)} of at least {end} bytes")
