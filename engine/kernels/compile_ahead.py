"""Compiles every Triton kernel for real GPUs on a machine that has none, and says what the code uses.

`python -m engine.kernels.compile_ahead [--arch 80 90] [--only NAME]` prints registers per thread, spilled
bytes and shared memory of each variant, and exits with 1 when one spills registers or asks for more shared
memory than a block can have. The variants are those of real models.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from engine.kernels.activation.triton_activation import gate_kernel
from engine.kernels.attention.launch_shape import launch_shape
from engine.kernels.attention.triton_kernels import attention_kernel, list_parts_kernel, merge_kernel
from engine.kernels.attention.triton_plan import MOST_PARTS, PART
from engine.kernels.linear.triton_dense import dense_kernel
from engine.kernels.linear.triton_grouped import (
    grouped_kernel,
    grouped_scaled_kernel,
    grouped_weight_only_kernel,
)
from engine.kernels.linear.triton_linear import quantize_rows_kernel, scaled_kernel, weight_only_kernel
from engine.kernels.norm.triton_norm import rms_norm_kernel
from engine.kernels.paged_cache.triton_blocks import BLOCK, move_blocks_kernel
from engine.kernels.rope.triton_rope import rope_and_store_kernel
from engine.kernels.sampling.triton_sampling import draw_kernel, process_logits_kernel

# Shared memory that one block may ask for, in bytes.
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
FIRST_ARCH_WITH_FLOAT8 = 89
# Type of a cache to what launch shapes go by.
KV_KINDS = {"*bf16": "plain", "*i8": "int8", "*fp8e4nv": "fp8"}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel with everything that is decided at compile time."""

    name: str
    kernel: Any
    # Parameter to type: "*bf16", "i32", "fp32"; the rest are constants.
    types: Mapping[str, str]
    constants: Mapping[str, object]
    # What a launch has that says nothing.
    num_warps: int = 4
    num_stages: int = 3
    float8: bool = False
    # Numbers that are multiples of 16 in real models, as launches find out, too.
    multiples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the machine code of one variant uses."""

    name: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int

    @property
    def fits(self) -> bool:
        """Whether nothing spills and a block's shared memory suffices."""
        return not self.spilled_bytes and self.shared_bytes <= SHARED_LIMIT[self.arch]


def variants(arch: int) -> list[Variant]:
    """Every kernel in the shapes of real models, as they are launched on an architecture."""
    return [
        *_attention_variants(arch),
        *_row_variants(),
        *_sampling_variants(),
        *_linear_variants(),
    ]


def _attention_variants(arch: int) -> list[Variant]:
    pointers = {
        "positions": "*i32",
        "part_base": "*i32",
        "rows": "*i32",
        "fields": "*i32",
        "num_listed": "*i32",
        "tables": "*i32",
        "sums": "*fp32",
        "stats": "*fp32",
        "scales": "*fp32",
        "sinks": "*fp32",
        "q": "*bf16",
        "out": "*bf16",
        **dict.fromkeys(("num_items", "table_stride", "num_heads", "num_kv_heads", "window"), "i32"),
        **dict.fromkeys(("scale", "soft_cap"), "fp32"),
    }
    plain = {"TAIL": 0, "TAIL_BLOCK": 16, "BLOCK_SIZE": 16} | dict.fromkeys(
        ("SHARED_VALUE", "SCALED", "SOFT_CAP", "WINDOW", "SINKS"), False
    )
    latent: dict[str, object] = {"TAIL": 64, "TAIL_BLOCK": 64, "SHARED_VALUE": True}
    scaled, local = {"SCALED": True}, {"SOFT_CAP": True, "WINDOW": True}
    # Name, heads of a group, size of a value, type of the cache, changes.
    shapes: list[tuple[str, int, int, str, dict[str, object]]] = [
        ("llama", 4, 128, "*bf16", {}),
        ("llama, int8 KV", 4, 128, "*i8", {**scaled}),
        ("llama, fp8 KV", 4, 128, "*fp8e4nv", {**scaled}),
        ("gemma", 2, 256, "*bf16", {**local}),
        ("gemma, int8 KV", 2, 256, "*i8", {**local, **scaled}),
        ("gemma, fp8 KV", 2, 256, "*fp8e4nv", {**local, **scaled}),
        ("gpt-oss", 8, 64, "*bf16", {"SINKS": True, "WINDOW": True}),
        ("deepseek", 128, 512, "*bf16", latent),
        ("deepseek, fp8 KV", 128, 512, "*fp8e4nv", {**latent, **scaled}),
    ]
    made = []
    for name, group, size, kind, changes in shapes:
        for final, listed in ((True, False), (False, False), (False, True)):
            key_dim = size + int(str(changes.get("TAIL", 0)))
            launch = launch_shape(
                group=group, key_dim=key_dim, final=final, kv=KV_KINDS[kind], arch=f"sm_{arch}"
            )
            sizes = dict.fromkeys(("MAIN", "MAIN_BLOCK", "VALUE_DIM", "VALUE_BLOCK"), size)
            decided = {
                "GROUP": launch.heads,
                "CHUNKS": group // launch.heads,
                "TILE": launch.tile,
                "STEP": launch.step,
            }
            made.append(
                Variant(
                    name=f"{'prefill' if final else 'decode'} {name}{', captured' if listed else ''}",
                    kernel=attention_kernel,
                    types={**pointers, "keys": kind, "values": kind},
                    constants={**plain, **sizes, **decided, **changes, "FINAL": final, "LISTED": listed},
                    num_warps=launch.num_warps,
                    num_stages=launch.num_stages,
                    float8="fp8" in kind,
                )
            )
    merge_types = dict.fromkeys(("sums", "stats", "sinks"), "*fp32") | {
        **dict.fromkeys(("part_base", "part_count"), "*i32"),
        "out": "*bf16",
        "num_heads": "i32",
    }
    merges = [
        Variant(
            name=f"attention merge, {size}",
            kernel=merge_kernel,
            types=merge_types,
            constants={"VALUE_DIM": size, "BLOCK": size, "SINKS": sinks},
        )
        for size, sinks in ((128, False), (64, True), (512, False))
    ]
    listing = Variant(
        name="parts of captured rows",
        kernel=list_parts_kernel,
        types={
            **dict.fromkeys(("context_lens", "positions", "part_count", "fields", "num_listed"), "*i32"),
            **dict.fromkeys(("num_rows", "capacity", "most", "window"), "i32"),
        },
        constants={"ROWS": 256, "PART": PART, "MOST_PARTS": MOST_PARTS, "WINDOW": True},
    )
    return [*made, *merges, listing]


def _row_variants() -> list[Variant]:
    norm_types = {
        **dict.fromkeys(("x", "residual", "residual_out"), "*bf16"),
        **dict.fromkeys(("weight", "factors", "scale_out"), "*fp32"),
        **dict.fromkeys(("row_stride", "inner", "inner_stride"), "i32"),
        "width": "i32",
        "eps": "fp32",
    }
    rope_types = {
        **dict.fromkeys(("q", "k", "v", "q_out"), "*bf16"),
        **dict.fromkeys(("cos", "sin", "scales"), "*fp32"),
        "slots": "*i64",
        **dict.fromkeys(
            ("q_stride", "k_stride", "v_stride", "num_heads", "num_kv_heads", "half", "block_size"), "i32"
        ),
    }
    norms = [
        Variant(
            name=f"norm 4096{name}",
            kernel=rms_norm_kernel,
            types={**norm_types, "out": out},
            constants={
                "BLOCK": 4096,
                "HAS_RESIDUAL": True,
                "FACTORS": out == "*i8",
                "LIMIT": limit,
                "ROUND": out == "*i8",
            },
            num_warps=8,
            float8="fp8" in out,
        )
        for name, out, limit in (
            ("", "*bf16", 0.0),
            (" to int8", "*i8", 127.0),
            (" to fp8", "*fp8e4nv", 448.0),
        )
    ]
    ropes = [
        Variant(
            name=f"rope and store{name}",
            kernel=rope_and_store_kernel,
            types={**rope_types, "keys": kind, "values": kind},
            constants={
                "KEY_DIM": 128,
                "VALUE_DIM": 128,
                "BLOCK": 128,
                "INTERLEAVED": False,
                "LIMIT": limit,
                "ROUND": kind == "*i8",
            },
            num_warps=1,
            float8="fp8" in kind,
        )
        for name, kind, limit in (
            ("", "*bf16", 0.0),
            (", int8 KV", "*i8", 127.0),
            (", fp8 KV", "*fp8e4nv", 448.0),
        )
    ]
    gates = [
        Variant(
            name=f"gate {kind}",
            kernel=gate_kernel,
            types={"gate_and_up": "*bf16", "out": "*bf16", "size": "i32"},
            constants={"KIND": kind, "BLOCK": 1024},
        )
        for kind in range(4)
    ]
    moves = [
        Variant(
            name=f"blocks {'out' if out else 'in'}",
            kernel=move_blocks_kernel,
            types={
                **dict.fromkeys(("bases", "offsets", "sizes", "blocks"), "*i64"),
                "rows": "*i32",
                "row_words": "i32",
            },
            constants={"OUT": out, "BLOCK": BLOCK},
            num_warps=8,
        )
        for out in (True, False)
    ]
    return norms + ropes + gates + moves


def _sampling_variants() -> list[Variant]:
    floats = ("logits", "out", "repetition", "frequency", "presence", "biases")
    processing = {
        **dict.fromkeys(floats, "*fp32"),
        **dict.fromkeys(("count_row", "output_counts", "bias_row", "mask_row", "masks"), "*i32"),
        "seen": "*i1",
        "finite": "*i32",
        **dict.fromkeys(("vocab_size", "mask_words"), "i32"),
    }
    drawing = {
        **dict.fromkeys(("processed", "temperatures", "min_ps", "top_ps"), "*fp32"),
        "top_ks": "*i32",
        "noise_keys": "*i64",
        "tokens": "*i64",
        "allowed": "*i1",
        "vocab_size": "i32",
    }
    everything = {"BLOCK": 4096, "WRITE": True, "PENALTIES": True, "BIASES": True, "MASKS": True}
    return [
        Variant(name="process logits", kernel=process_logits_kernel, types=processing, constants=everything),
        Variant(name="draw", kernel=draw_kernel, types=drawing, constants={"BLOCK": 4096}, num_warps=8),
    ]


def _linear_variants() -> list[Variant]:
    strides = ("x_row", "weight_batch", "weight_output", "out_row")
    tile = {"TILE_M": 64, "TILE_N": 64, "TILE_K": 64}
    sizes = dict.fromkeys(("rows", "inputs", "outputs"), "i32")
    weight_only = {
        **dict.fromkeys(("x", "bias", "out"), "*bf16"),
        **dict.fromkeys(("scale", "minimum"), "*fp32"),
        **sizes,
        "groups": "i32",
        "x_stride": "i32",
    }
    scaled = {
        **dict.fromkeys(("x_scale", "weight_scale"), "*fp32"),
        "bias": "*bf16",
        "out": "*bf16",
        **sizes,
    }
    grouped = {
        **dict.fromkeys(("x", "weights", "out"), "*bf16"),
        **dict.fromkeys(("order", "weight_of_tile"), "*i32"),
        "scale": "fp32",
        "inputs": "i32",
        "outputs": "i32",
        "rows_per_input": "i32",
    }
    multiples = ("inputs", "outputs", "x_stride")
    chosen = {
        **dict.fromkeys(("order", "weight_of_tile"), "*i32"),
        "rows_per_input": "i32",
    }
    made = [
        Variant(
            multiples=multiples,
            name=f"W{bits}A16{name}",
            kernel=kernel,
            types={**weight_only, **chosen, "weight": kind},
            constants={**tile, "BITS": bits, "MIDDLE": middle, "MINIMUM": bits == 4, "BIAS": False},
        )
        for bits, kind, middle in ((4, "*u8", 8), (8, "*i8", 0))
        for name, kernel in (("", weight_only_kernel), (" experts", grouped_weight_only_kernel))
    ]
    formats = (("W8A8", "*i8", False), ("fp8", "*fp8e4nv", False), ("fp8 128x128", "*fp8e4nv", True))
    for (name, kind, blocked), (suffix, kernel) in itertools.product(
        formats, (("", scaled_kernel), (" experts", grouped_scaled_kernel))
    ):
        made.append(
            Variant(
                multiples=multiples,
                name=name + suffix,
                kernel=kernel,
                types={**scaled, **chosen, "x": kind, "weight": kind},
                constants={
                    **tile,
                    "INTEGER": kind == "*i8",
                    "BLOCKED": blocked,
                    "BIAS": False,
                    "SCALE_BLOCK": 128,
                },
                float8="fp8" in kind,
            )
        )
    for name, kind, limit in (("int8", "*i8", 127.0), ("fp8", "*fp8e4nv", 448.0)):
        made.append(
            Variant(
                name=f"rows to {name}",
                kernel=quantize_rows_kernel,
                types={
                    "x": "*bf16",
                    **dict.fromkeys(("factors", "scales"), "*fp32"),
                    "out": kind,
                    **dict.fromkeys(("row_stride", "inner", "width"), "i32"),
                },
                constants={"BLOCK": 16384, "FACTORS": True, "LIMIT": limit, "ROUND": kind == "*i8"},
                num_warps=16,
                float8="fp8" in kind,
            )
        )
    for name, kind, columns, step in (("bf16", "*bf16", 128, 64), ("float32", "*fp32", 64, 32)):
        made.append(
            Variant(
                name=f"invariant {name}",
                multiples=("inputs", "outputs", *strides),
                kernel=dense_kernel,
                types={
                    **dict.fromkeys(("x", "weight", "bias", "out"), kind),
                    **dict.fromkeys(("rows", "inputs", "outputs", "x_batch", "out_batch", *strides), "i32"),
                },
                constants={
                    "BIAS": False,
                    "TILE_M": 64,
                    "TILE_N": columns,
                    "TILE_K": step,
                    "TOGETHER": 8,
                    "weight_input": 1,
                },
                num_warps=8,
            )
        )
    for name, add in (("experts", False), ("adapters", True)):
        made.append(
            Variant(
                name=f"grouped rows, {name}",
                multiples=multiples,
                kernel=grouped_kernel,
                types=grouped,
                constants={**tile, "ADD": add},
            )
        )
    return made


def compile_variant(variant: Variant, arch: int) -> Usage:
    """Compiles one variant for one architecture; raises what Triton raises for code that it cannot."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    # Kernels that are alike share a description, and each takes of it what it has.
    constants = {name: value for name, value in variant.constants.items() if name in names}
    # As launches find it: tensors begin at multiples of 16 bytes.
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name].startswith("*") or name in variant.multiples
    }
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {
        "num_warps": variant.num_warps,
        "num_stages": variant.num_stages,
        # Releases differ in what they do unasked.
        "enable_fp_fusion": True,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    registers, spilled = _assembled(str(compiled.asm["ptx"]), get_ptxas(arch).path)
    return Usage(
        name=variant.name,
        arch=arch,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=int(compiled.metadata.shared),
    )


def _assembled(ptx: str, assembler: str) -> tuple[int, int]:
    """Registers per thread and spilled bytes, as the assembler reports them."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [
            str(assembler),
            "-v",
            f"--gpu-name={target[1]}",
            str(source),
            "-o",
            f"{folder}/kernel.cubin",
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    spilled = [int(number) for number in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    return max(registers, default=0), sum(spilled)


def compile_all(archs: Sequence[int], only: str = "") -> list[Usage]:
    """Usage of every variant on every architecture that has its types."""
    wanted = [
        (variant, arch)
        for arch in archs
        for variant in variants(arch)
        if only in variant.name and (not variant.float8 or arch >= FIRST_ARCH_WITH_FLOAT8)
    ]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda pair: compile_variant(*pair), wanted))


def main() -> int:
    """Prints a line per variant; 1 when one does not fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--arch", type=int, nargs="+", choices=sorted(SHARED_LIMIT), default=sorted(SHARED_LIMIT)
    )
    parser.add_argument("--only", default="", help="variants whose name contains this")
    arguments = parser.parse_args()
    usages = compile_all(arguments.arch, arguments.only)
    print(f"{'kernel':34}{'arch':>6}{'registers':>11}{'spilled':>9}{'shared KiB':>12}")
    for usage in usages:
        print(
            f"{usage.name:34}{'sm_' + str(usage.arch):>6}{usage.registers:>11}{usage.spilled_bytes:>9}"
            f"{usage.shared_bytes / 1024:>12.1f}{'' if usage.fits else '   does not fit'}"
        )
    return 0 if all(usage.fits for usage in usages) else 1


if __name__ == "__main__":
    sys.exit(main())
