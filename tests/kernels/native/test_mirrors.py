"""Structures that Python fills for the native kernels lie in memory as the compiler has them."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.kernels.activation.native import ActivationArgs, SoftCapArgs
from engine.kernels.attention.native_ops import AttentionArgs, AttentionPlanArgs
from engine.kernels.embedding.native import EmbeddingArgs
from engine.kernels.experts.native import ExpertGemmArgs, ExpertPlanArgs, ExpertSumArgs, RouteArgs
from engine.kernels.linear.native import _PackArgs, _WidthArgs
from engine.kernels.linear.packed import GemmArgs, PackedWeightStruct
from engine.kernels.native import build
from engine.kernels.native.decode import DecodeArgs
from engine.kernels.native.library import OpStruct, StepStruct
from engine.kernels.native.streaming import StreamArgs
from engine.kernels.norm.native import RmsNormArgs
from engine.kernels.paged_cache.native import KvCacheStruct
from engine.kernels.rope.native import HeadProductArgs, LatentCacheArgs, RopeCacheArgs
from engine.kernels.sampling.native import SAMPLE_ROW, LogprobArgs, SampleArgs

MIRRORS: tuple[Any, ...] = (
    ActivationArgs,
    AttentionArgs,
    AttentionPlanArgs,
    DecodeArgs,
    EmbeddingArgs,
    ExpertGemmArgs,
    ExpertPlanArgs,
    ExpertSumArgs,
    GemmArgs,
    HeadProductArgs,
    KvCacheStruct,
    LatentCacheArgs,
    LogprobArgs,
    OpStruct,
    PackedWeightStruct,
    RmsNormArgs,
    RopeCacheArgs,
    RouteArgs,
    SampleArgs,
    SoftCapArgs,
    StepStruct,
    StreamArgs,
    _PackArgs,
    _WidthArgs,
)


def layout_here() -> dict[str, int]:
    """Offset of every field, and size of every structure, by their names in C++."""
    found = {}
    for mirror in MIRRORS:
        name = mirror.__name__.strip("_").removesuffix("Struct")
        found[name] = ctypes.sizeof(mirror)
        found |= {f"{name}.{field}": getattr(mirror, field).offset for field, *_ in mirror._fields_}
    fields: Any = SAMPLE_ROW.fields
    found["SampleRow"] = np.dtype(SAMPLE_ROW).itemsize
    return found | {f"SampleRow.{field}": place[1] for field, place in fields.items()}


def test_every_structure_that_ops_take_has_a_mirror() -> None:
    defined = {
        name for path in build.sources(".h") for name in re.findall(r"struct (\w+Args) ", path.read_text())
    }
    assert defined
    assert defined - layout_here().keys() == set()


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
