"""Structures that Python fills for the native kernels lie in memory as the compiler has them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

from kernels.native import build
from kernels.native.mirror import structure


def names() -> list[str]:
    """Structures that ops take, and those inside them or that they point at."""
    texts = [path.read_text() for path in build.sources(".h")]
    taken = [name for text in texts for name in re.findall(r"struct (\w+Args) ", text)]
    assert taken
    return [*taken, "KvCache", "Op", "PackedWeight", "SampleRow", "Step"]


def layout_here() -> dict[str, int]:
    """Offset of every field, and size of every structure, by their names in C++."""
    found = {}
    for name in names():
        mirror = structure(name)
        found[name] = ctypes.sizeof(mirror)
        found |= {f"{name}.{field}": getattr(mirror, field).offset for field, *_ in mirror._fields_}
    return found


def test_every_field_lies_where_the_compiler_puts_it(tmp_path: Path) -> None:
    compiler = build._compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    here = layout_here()
    asked = [
        f'  std::printf("%zu\\n", {"offsetof" if "." in name else "sizeof"}'
        f"(millrace::{name.replace('.', ', ')}));"
        for name in here
    ]
    source = tmp_path / "layout.cc"
    included = [
        str(path.relative_to(build.ROOT)) for path in build.sources(".h") if "Args {" in path.read_text()
    ]
    source.write_text(
        "\n".join(
            [
                "#include <cstddef>",
                "#include <cstdio>",
                *(f'#include "{name}"' for name in included),
                "int main() {",
                *asked,
                "}",
            ]
        )
    )
    program = tmp_path / "layout"
    command = [compiler, "-std=c++17", "-mavx2", "-mfma", "-mf16c", "-Wno-invalid-offsetof"]
    command += ["-I", str(build.ROOT), str(source), "-o", str(program)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(here, map(int, told), strict=True)) == here
