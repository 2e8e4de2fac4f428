"""Every Triton kernel compiles for sm_80 and sm_90 without a GPU, and nothing spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_every_kernel_fits_real_gpus() -> None:
    # A process of its own: here, kernels are interpreted.
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "engine.kernels.compile_ahead"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "attention_kernel" in line]
    assert any("sm_80" in line for line in lines)
    # Hopper's own: products of groups of warps for prompts, and bulk copies where a step is a whole block.
    for model in ("llama", "gemma", "gpt-oss"):
        for kind in ("bfloat16", "int8", "float8_e4m3fn"):
            for block_size, words in ((16, "wgmma"), (64, "wgmma tma")):
                start = f"eager {model}, bfloat16 over {kind}, blocks of {block_size}: attention_kernel"
                matching = [line for line in lines if line.startswith(start) and "sm_90" in line]
                assert any(line.endswith(words) for line in matching), (start, done.stdout)


def test_a_layer_of_experts_is_a_handful_of_launches() -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.gpu.counts", "--only", "experts"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    counted = [int(number) for number in re.findall(r"(\d+) launches", done.stdout)]
    # bfloat16, and five quantized formats, with few rows and many.
    assert len(counted) == 18
    assert max(counted) <= 10
