"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, and nothing spills."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from benchmarks.gpu.compile_ahead import Assembling, read, variants

ROOT = Path(__file__).resolve().parents[3]
TABLE = ROOT / "benchmarks/results/kernels_compiled_ahead.json"
# Every kernel once, where two cores compile for a minute; `make test-gpu-versions` compiles all variants.
CHOSEN = (
    *(
        "llama, bfloat16 over bfloat16, blocks of 64",
        "captured llama, bfloat16 over kivi4",
        "rope and store, kivi4",
        "W4A16, 5 rows",
        "W4A16, 1000 rows",
        "W8A8, 100 rows",
        "fp8, 5 rows",
    ),
    *("experts, 1000 rows each", "invariant bfloat16", "Qwen3", "norm 4096", "rope and store, bfloat16"),
    *("gate silu", "blocks out", "blocks in", "draw", "adapters of rank 16, bfloat16, 5 rows"),
    *("delta rule, Qwen3-Next", "recurrent units", "selective scan"),
)
COMMAND = [sys.executable, "-m", "benchmarks.gpu.compile_ahead"]


def compile_ahead(*arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: here, kernels are interpreted.
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


@pytest.mark.timeout(600)
def test_every_kernel_that_is_launched_fits_real_gpus() -> None:
    done = compile_ahead("--json", "--only", *CHOSEN)
    assert done.returncode == 0, done.stdout + done.stderr
    usages = json.loads(done.stdout)
    assert {usage["arch"] for usage in usages} == {80, 90}
    assert {usage["name"].rpartition(": ")[2] for usage in usages} == launched_kernels()


def test_the_record_has_every_variant_with_both_releases_and_all_fit() -> None:
    kept = read(TABLE)
    for release in {usage.triton for usage in kept}:
        for arch in (80, 90):
            there = {
                usage.name.rpartition(": ")[0]
                for usage in kept
                if (usage.arch, usage.triton) == (arch, release)
            }
            missing = {name for name, _ in variants(arch)} - there
            # The older architecture has no numbers of this type.
            assert all("fp8" in name or "float8" in name for name in missing if arch == 80)
            assert arch == 80 or not missing
    assert len({usage.triton for usage in kept}) == 2
    assert not [usage for usage in kept if not usage.fits]


def test_prompts_on_hopper_take_its_own_instructions() -> None:
    """Products of groups of warps, and bulk copies where a step lies within a block."""
    found = {
        usage.name: set(usage.instructions)
        for usage in read(TABLE)
        if usage.arch == 90 and usage.triton == triton.__version__
    }
    for model in ("llama", "gemma", "gpt-oss"):
        for kind in ("bfloat16", "int8", "float8_e4m3fn"):
            for block_size, words in ((16, {"wgmma"}), (64, {"wgmma", "tma"})):
                name = f"eager {model}, bfloat16 over {kind}, blocks of {block_size}: attention_kernel"
                assert found[name] == words, name


def launched_kernels() -> set[str]:
    """Names of the kernels that the engine's code launches, as it is written: name[grid](...)."""
    trees = [
        ast.parse(path.read_text()) for room in ("engine", "kernels") for path in (ROOT / room).rglob("*.py")
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    defined = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)
    }
    launched = {
        node.func.value.id
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.value, ast.Name)
    }
    return defined & launched


def test_a_kernel_that_does_not_compile_is_told_and_the_others_are_compiled(tmp_path: Path) -> None:
    """A release of Triton that takes nothing stands for one that does not take a kernel."""
    code = (
        "import sys\n"
        "from triton.runtime.jit import JITFunction\n"
        "plain = JITFunction.run\n"
        "def refuse(kernel, *given, **options):\n"
        "    if kernel.fn.__name__ == 'rms_norm_kernel':\n"
        "        raise ValueError('no such instruction')\n"
        "    return plain(kernel, *given, **options)\n"
        "JITFunction.run = refuse\n"
        "from benchmarks.gpu.compile_ahead import main\n"
        "sys.argv = ['compile_ahead', '--arch', '90', '--only', 'norm 4096']\n"
        "raise SystemExit(main())\n"
    )
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "norm 4096: rms_norm_kernel, sm_90" in done.stdout
    assert "ValueError: no such instruction" in done.stdout


def test_what_the_assembler_says_is_kept_by_what_it_was_given(tmp_path: Path) -> None:
    source = tmp_path / "kernel.ptx"
    source.write_text("a kernel")
    command = ["sh", "-c", 'echo "$@" >&2', "sh", "--as-this-release-asks", str(source)]
    with (tmp_path / "log").open("w") as log:
        Assembling().run(command, check=True, stderr=log)
    assert Assembling.said["a kernel"] == f"--as-this-release-asks {source}\n"


def test_a_layer_of_experts_is_a_handful_of_launches() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.counts", "--only", "experts"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    counted = [int(number) for number in re.findall(r"(\d+) launches", done.stdout)]
    # bfloat16, and five quantized formats, with few rows and many.
    assert len(counted) == 18
    assert max(counted) <= 10
