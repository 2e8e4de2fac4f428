"""Checkpoints with numbers that are not finite are refused by file and tensor, however they are stored."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.model.spec import CheckpointError
from kernels.linear.formats import is_finite
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantization import gguf_writer, writers
from tests.unit.engine.quantization.test_stored import AWQ, FP8, GPTQ, INT8_CHANNELS, SIZES, compressed
from tests.unit.engine.runner.driver import open_runner

LAYER = "model.layers.1.mlp.down_proj"
STORED: dict[str, tuple[dict[str, Any] | None, Any, str]] = {
    "dense": (None, None, "weight"),
    "awq": (AWQ, writers.awq, "scales"),
    "gptq": (GPTQ, writers.gptq, "scales"),
    "packed": (compressed("pack-quantized"), writers.packed, "weight_scale"),
    "int8": (compressed("int-quantized", **INT8_CHANNELS), writers.int_quantized, "weight_scale"),
    "fp8": (compressed("float-quantized", **FP8), writers.float_quantized, "weight"),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        partial(writers.block_fp8, block=48),
        "weight_scale_inv",
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_the_tensor_is_named(name: str, tmp_path: Path) -> None:
    settings, writer, suffix = STORED[name]
    model = make_checkpoint(tmp_path, "llama", **SIZES)
    if settings is not None:
        writers.rewrite(tmp_path, model, settings, writer)
    tensors = load_file(tmp_path / "model.safetensors")
    damaged = tensors[f"{LAYER}.{suffix}"]
    wide = damaged.float()
    wide[-1, 0] = float("nan")
    tensors[f"{LAYER}.{suffix}"] = wide.to(damaged.dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    place = re.escape(f"{tmp_path}/model.safetensors: tensor {LAYER}.{suffix}")
    with pytest.raises(CheckpointError, match=rf"^{place} holds numbers that are not finite"):
        open_runner(tmp_path)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.Q8_0, Kind.Q4_1])
def test_the_tensor_of_a_gguf_file_is_named(kind: Kind, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "original", "llama", **SIZES)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 5] = 1e9  # beyond a scale of float16
    gguf_writer.write(tmp_path / "m.gguf", model, "llama", {"": kind})
    place = re.escape(f"{tmp_path}/m.gguf: tensor {LAYER}.weight")
    with pytest.raises(CheckpointError, match=rf"^{place} holds numbers that are not finite"):
        open_runner(tmp_path / "m.gguf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_pass_tells(dtype: torch.dtype) -> None:
    """Also where the sum is too large for the type, or infinities of both signs are all there is."""
    values = torch.full((70, 3), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(values)
    values[69, 2] = float("-inf")
    assert not is_finite(values)
    values[0, 0] = float("inf")
    assert not is_finite(values)
