"""ctypes structures that lie in memory as the kernels' structs do, read from their headers."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from typing import Any

from kernels.native.build import sources

_NUMBERS = {"int64_t": ctypes.c_int64, "float": ctypes.c_float, "OpFunction": ctypes.c_void_p}
_STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
# Fields of structs that Python fills in: numbers, pointers, other such structs.
_FIELDS = re.compile(r"^  (?:const )?(\w+)(\*?) (\w+(?:, \w+)*);", re.MULTILINE)


@cache
def _bodies() -> dict[str, str]:
    return {name: body for path in sources(".h") for name, body in _STRUCT.findall(path.read_text())}


@cache
def structure(name: str) -> Any:
    """The class for the struct of that name in some header, which says what its fields are."""
    fields = [
        (field, ctypes.c_void_p if pointer else _NUMBERS.get(kind) or structure(kind))
        for kind, pointer, names in _FIELDS.findall(_bodies()[name])
        for field in names.split(", ")
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})
