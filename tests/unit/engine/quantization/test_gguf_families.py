"""GGUF files of architectures that converters change more of than names give the logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from engine.model.checkpoint import read_headers
from engine.model.gguf_file import open_gguf
from engine.model.spec import CheckpointError
from engine.quantization.gguf_blocks import block_readers
from kernels.linear.formats import scales_of
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.quantization.gguf_converter import convert
from tests.unit.engine.quantization.test_stored import assert_equals

CORRECTED = {
    "expert_count": 6,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64}
GRANITE = {
    "embedding_scale": 3.0,
    "attention.scale": 0.4,
    "residual_scale": 0.3,
    "logit_scale": 2.0,
}
DELTA = {"ssm.inner_size": 80, "rope.dimension_count": 4}
SPARSE = {"expert_count": 6, "expert_shared_feed_forward_length": 24}
LATENT = {
    "attention.head_count_kv": 1,
    "attention.key_length": 24,
    "attention.value_length": 16,
    "attention.key_length_mla": 20,
    "attention.value_length_mla": 10,
    "attention.q_lora_rank": 24,
    "attention.kv_lora_rank": 16,
    "rope.dimension_count": 8,
    "expert_shared_count": 2,
    "leading_dense_block_count": 1,
}
MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.group_count": 2,
    "ssm.inner_size": 96,
    "ssm.state_size": 20,
    "ssm.time_step_rank": 8,
}
JAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 96,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 3,
    "attention.head_count_kv": [0, 2, 0, 0],
}
# What is stated of models without attention, of which most says nothing.
KEYLESS = {
    "context_length": 1 << 20,
    "attention.head_count": 0,
    "feed_forward_length": 0,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "ssm.conv_kernel": 4,
}
HYBRID = GRANITE | MAMBA | {"attention.head_count_kv": [0, 2, 0], "rope.scaling.finetuned": False}
# Case of the families' tests to its architecture there, and what it says besides.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": ("gpt-oss", YARN | {"expert_count": 4, "expert_feed_forward_length": 88}),
    "glm4-moe": ("glm4moe", CORRECTED | {"expert_weights_scale": 1.7, "rope.dimension_count": 8}),
    "dots1": ("dots1", CORRECTED | {"expert_weights_norm": False}),
    "granite-moe": ("granitemoe", GRANITE | {"expert_count": 4}),
    "granite-moe-shared": (
        "granitemoe",
        GRANITE | {"expert_count": 5, "expert_shared_feed_forward_length": 24},
    ),
    "ministral3": (
        "mistral3",
        YARN
        | {
            "rope.scaling.original_context_length": 16,
            "rope.scaling.yarn_log_multiplier": 1.0,
            "attention.temperature_scale": 0.4,
        },
    ),
    "lfm2": ("lfm2", {"feed_forward_length": 64, "attention.head_count_kv": [0, 2, 0, 0]}),
    "lfm2-moe": (
        "lfm2moe",
        {"expert_count": 6, "leading_dense_block_count": 1, "attention.head_count_kv": [0, 0, 2, 0]},
    ),
    "qwen3.5": ("qwen35", DELTA),
    "qwen3.5-moe": ("qwen35moe", DELTA | SPARSE),
    "qwen3-next-heads": ("qwen3next", DELTA | SPARSE | {"ssm.inner_size": 60}),
    "ernie4.5-moe": (
        "ernie4_5-moe",
        {"expert_count": 6, "expert_used_count": 3, "interleave_moe_layer_step": 2}
        | {"leading_dense_block_count": 1, "expert_shared_count": 2},
    ),
    "exaone-moe": (
        "exaone-moe",
        CORRECTED
        | {"expert_weights_scale": 2.5, "attention.sliding_window_pattern": [True, False, True, False]},
    ),
    "jais2": ("jais2", {}),
    "deepseek-v3": (
        "deepseek2",
        LATENT
        | {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2, "expert_gating_func": 2}
        | {"expert_weights_scale": 2.5, "expert_weights_norm": True},
    ),
    "deepseek-v2": ("deepseek2", LATENT | {"expert_count": 8}),
    "glm4-moe-lite": (
        "deepseek2",
        LATENT
        | {"expert_count": 6, "expert_weights_scale": 1.8, "expert_weights_norm": True}
        | {"expert_gating_func": 2},
    ),
    "granite-4": ("granitehybrid", HYBRID | {"expert_count": 0, "feed_forward_length": 40}),
    "granite-4-moe": (
        "granitehybrid",
        HYBRID | {"expert_count": 4, "expert_shared_feed_forward_length": 24},
    ),
    "falcon-h1": ("falcon-h1", MAMBA),
    "kimi-linear": (
        "kimi-linear",
        {key: value for key, value in LATENT.items() if key != "attention.q_lora_rank"}
        | {"attention.head_count_kv": [0, 4, 0], "kda.head_dim": 12, "ssm.conv_kernel": 4}
        | {"expert_count": 8, "expert_used_count": 2, "expert_shared_count": 1, "expert_gating_func": 2}
        | {"expert_group_count": 4, "expert_group_used_count": 2, "context_length": 256}
        | {"expert_weights_scale": 2.446, "expert_weights_norm": True},
    ),
    "jamba": ("jamba", JAMBA | {"expert_count": 4}),
    "jamba-dense": (
        "jamba",
        JAMBA
        | {"ssm.conv_kernel": 3, "ssm.inner_size": 144, "ssm.state_size": 6, "ssm.time_step_rank": 5}
        | {"attention.head_count_kv": [0, 0, 2]},
    ),
    "mamba": ("mamba", KEYLESS | {"ssm.inner_size": 96, "ssm.state_size": 12, "ssm.time_step_rank": 3}),
    "mamba-wide": (
        "mamba",
        KEYLESS
        | {"ssm.conv_kernel": 3, "ssm.inner_size": 144, "ssm.state_size": 6, "ssm.time_step_rank": 5}
        | {"ssm.dt_b_c_rms": False, "block_count": 3},
    ),
    "falcon-mamba": (
        "mamba",
        KEYLESS
        | {"ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 3}
        | {"ssm.dt_b_c_rms": True, "block_count": 3},
    ),
    "mamba2": ("mamba2", KEYLESS | MAMBA | {"block_count": 3}),
    "mamba2-whole": ("mamba2", KEYLESS | MAMBA | {"block_count": 3, "ssm.group_count": 1}),
    "apertus": ("apertus", {}),
    "llama4": (
        "llama4",
        {"expert_count": 4, "feed_forward_length": 40, "expert_feed_forward_length": 88}
        | {"interleave_moe_layer_step": 2},
    ),
    "mistral4": (
        "mistral4",
        LATENT
        | YARN
        | {"expert_count": 8, "expert_group_count": 4, "expert_group_used_count": 2}
        | {"expert_weights_scale": 1.5, "expert_weights_norm": True, "attention.temperature_scale": 0.3}
        | {"rope.scaling.original_context_length": 16, "rope.scaling.yarn_log_multiplier": 0.07},
    ),
    "phimoe": ("phimoe", {"expert_count": 6, "attention.sliding_window": 0}),
    "gpt-neox": ("gptneox", {"rope.dimension_count": 8, "use_parallel_residual": True}),
    "gpt-neox-serial": ("gptneox", {"rope.dimension_count": 6, "use_parallel_residual": False}),
    "nemotron-h-moe": (
        "nemotron_h_moe",
        MAMBA
        | {"ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4, "expert_count": 6}
        | {"attention.head_count_kv": [0, 0, 2, 0, 0], "feed_forward_length": [0, 20, 0, 20, 0]}
        | {"attention.layer_norm_epsilon": 1e-5, "expert_shared_feed_forward_length": 28, "block_count": 5}
        | {"expert_weights_norm": True, "expert_weights_scale": 1.5},
    ),
    "gpt2": (
        "gpt2",
        {"context_length": 256, "embedding_length": 48, "block_count": 2, "feed_forward_length": 192}
        | {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5},
    ),
    "stablelm": ("stablelm", {"rope.dimension_count": 6}),
    "hunyuan-moe": (
        "hunyuan-moe",
        {"expert_count": 4, "expert_used_count": 2, "expert_shared_count": 1},
    ),
    "minimax-m2": (
        "minimax-m2",
        {"expert_count": 6, "expert_feed_forward_length": 88, "rope.dimension_count": 8},
    ),
}
# What such a file does not tell, as all that were published have it.
CHANGES: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "llama4": {"floor_scale": 8192},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
            "llama_4_scaling_beta": 0.3,
        }
    },
    "phimoe": {
        "router_jitter_noise": 0.01,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    },
}
CONVOLUTIONS = {"shortconv.l_cache": 3, "attention.layer_norm_rms_epsilon": 1e-5}
BESIDE = {"lfm2": CONVOLUTIONS, "lfm2moe": CONVOLUTIONS}


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    arch, metadata = FAMILIES[name]
    oracle = make_checkpoint(tmp_path / "original", model_type, **changes | CHANGES.get(name, {}))
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, metadata | BESIDE.get(arch, {}))
    assert_equals(tmp_path / "model.gguf", oracle)


@pytest.mark.parametrize(
    ("case", "arch", "changes", "metadata"),
    [
        ("qwen2", "qwen2vl", {}, {}),
        ("qwen3", "qwen3vl", {}, {"n_deepstack_layers": 3}),
        ("qwen3-moe", "qwen3vlmoe", {"mlp_only_layers": []}, {"expert_count": 6, "n_deepstack_layers": 3}),
    ],
)
def test_text_models_of_those_that_see(
    case: str, arch: str, changes: dict[str, Any], metadata: dict[str, Any], tmp_path: Path
) -> None:
    model_type, own = CASES[case]
    oracle = make_checkpoint(tmp_path / "original", model_type, **own | changes)
    sections = {"rope.dimension_sections": [4, 3, 3, 0]}
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, metadata | sections)
    assert_equals(tmp_path / "model.gguf", oracle)


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss is published; in memory they are as in the file, or int8."""
    model_type, changes = CASES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    oracle = make_checkpoint(tmp_path / "original", model_type, **changes | sizes)
    with torch.no_grad():
        for layer in oracle.model.layers:
            for parameter in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                rows = np.ascontiguousarray(parameter.numpy().swapaxes(1, 2))
                meant = gguf.quants.dequantize(gguf.quants.quantize(rows, Kind.MXFP4), Kind.MXFP4)
                parameter.copy_(torch.from_numpy(meant.reshape(rows.shape).swapaxes(1, 2).copy()))
    oracle.save_pretrained(tmp_path / "original")
    arch, metadata = FAMILIES["gpt-oss"]
    given = metadata | {"expert_feed_forward_length": 96}
    kinds = {"_exps.weight": Kind.MXFP4}
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, given, kinds)
    header = read_headers(tmp_path / "model.gguf")["model.layers.0.mlp.experts.3.down_proj.weight"]
    assert (header.dtype, header.shape) == ("MXFP4", (64, 96))
    for native in ("off", "required"):
        assert_equals(tmp_path / "model.gguf", oracle, tolerance=1e-3, native=native)


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    rows = torch.zeros((3, 34), dtype=torch.uint8)
    rows[:, ::17] = 127
    rows[1, 17] = 255
    for coded in (False, True):
        assert not torch.isfinite(scales_of(block_readers(coded=coded)["MXFP4"](rows))[0]).all()


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.F16])
def test_heads_that_take_turns_are_moved_back_as_they_are_packed(kind: Kind, tmp_path: Path) -> None:
    model_type, changes = CASES["qwen3.5"]
    oracle = make_checkpoint(tmp_path / "original", model_type, **changes | {"hidden_size": 64})
    plain, packed = tmp_path / "plain.gguf", tmp_path / "packed.gguf"
    arch, metadata = FAMILIES["qwen3.5"]
    convert(tmp_path / "original", plain, arch, metadata)
    convert(tmp_path / "original", packed, arch, metadata, {"attn_gate.weight": kind})
    name = "model.layers.0.state.in_proj_z.weight"
    assert read_headers(packed)[name].dtype == kind.name
    expected = dict(oracle.named_parameters())["model.layers.0.linear_attn.in_proj_z.weight"].detach().numpy()
    np.testing.assert_array_equal(open_gguf(plain).array(name), expected)
    np.testing.assert_allclose(open_gguf(packed).array(name), expected, atol=0.01)


def test_layers_that_predict_are_left_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model_type, changes = CASES["glm4-moe"]
    oracle = make_checkpoint(tmp_path / "original", model_type, **changes)
    arch, metadata = FAMILIES["glm4-moe"]
    beyond = {"block_count": 3, "nextn_predict_layers": 1}
    extra = {"blk.2.nextn.eh_proj.weight": np.ones((48, 96), np.float32)}
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, metadata | beyond, extra=extra)
    assert_equals(tmp_path / "model.gguf", oracle)
    assert "1 tensors of layers that predict are not served" in caplog.text


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    model_type, changes = CASES["qwen3.5"]
    make_checkpoint(tmp_path / "original", model_type, **changes)
    arch, metadata = FAMILIES["qwen3.5"]
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, metadata | {"ssm.group_count": 3})
    with pytest.raises(CheckpointError, match=r"ssm\.time_step_rank = 4 and ssm\.group_count = 3 do not"):
        read_headers(tmp_path / "model.gguf")
