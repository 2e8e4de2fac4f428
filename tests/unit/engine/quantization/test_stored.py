"""Quantized checkpoints give the logits of transformers' model with the weights that they stand for."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.quantization.scheme import read_scheme
from engine.types import SamplingParams
from kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight, parts_of
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy, reference_logits
from tests.unit.engine.quantization import writers
from tests.unit.engine.quantization.writers import Writer, rewrite
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner, prompt_of

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    inputs = weights.pop("inputs", None)
    given = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    group = {"targets": ["Linear"], "weights": given, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def shuffled(inputs: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).permutation(inputs)


def gptq_in_order(weight: torch.Tensor) -> writers.Stored:
    return writers.gptq(weight, symmetric=False, permutation=shuffled(weight.shape[1]))


def gptq_in_own_order(weight: torch.Tensor) -> writers.Stored:
    seed = int(weight.abs().sum() * 1000)
    return writers.gptq(weight, permutation=shuffled(weight.shape[1], seed))


INT8_CHANNELS = {"num_bits": 8, "strategy": "channel", "group_size": None}
FP8 = INT8_CHANNELS | {"type": "float"}
CASES: dict[str, tuple[dict[str, Any], Writer, type]] = {
    "awq": (AWQ, writers.awq, Int4Weight),
    "gptq": (GPTQ, writers.gptq, Int4Weight),
    "gptq asymmetric": (GPTQ | {"sym": False}, partial(writers.gptq, symmetric=False), Int4Weight),
    "gptq v2": (
        GPTQ | {"checkpoint_format": "gptq_v2"},
        partial(writers.gptq, symmetric=False, lowered=0),
        Int4Weight,
    ),
    "gptq desc_act": (GPTQ | {"desc_act": True}, gptq_in_order, Int4Weight),
    "gptq orders apart": (GPTQ | {"desc_act": True}, gptq_in_own_order, [Int4Weight] * 3),
    "gptq one group": (GPTQ | {"group_size": -1}, partial(writers.gptq, group_size=-1), Int4Weight),
    "gptq no g_idx": (GPTQ, partial(writers.gptq, with_g_idx=False), Int4Weight),
    "gptq 8 bits": (GPTQ | {"bits": 8}, partial(writers.gptq, bits=8), Int8Weight),
    "gptq 8 bits asymmetric": (
        GPTQ | {"bits": 8},
        partial(writers.gptq, bits=8, symmetric=False),
        DenseWeight,
    ),
    "packed": (compressed("pack-quantized"), writers.packed, Int4Weight),
    "packed asymmetric": (
        compressed("pack-quantized", symmetric=False),
        partial(writers.packed, symmetric=False),
        Int4Weight,
    ),
    "packed channels": (
        compressed("pack-quantized", strategy="channel", group_size=None),
        partial(writers.packed, group_size=-1),
        Int4Weight,
    ),
    "packed 8 bits": (
        compressed("pack-quantized", num_bits=8),
        partial(writers.packed, bits=8),
        Int8Weight,
    ),
    "int8": (compressed("int-quantized", **INT8_CHANNELS), writers.int_quantized, Int8Weight),
    "int8 tensor": (
        compressed("int-quantized", num_bits=8, strategy="tensor", group_size=None),
        partial(writers.int_quantized, per_tensor=True),
        Int8Weight,
    ),
    "fp8": (compressed("float-quantized", **FP8), writers.float_quantized, DenseWeight),
    "fp8 tensor": (
        compressed("naive-quantized", **FP8 | {"strategy": "tensor"}),
        partial(writers.float_quantized, per_tensor=True),
        DenseWeight,
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        writers.block_fp8,
        DenseWeight,
    ),
}


def assert_equals(
    folder: Path, oracle: transformers.PreTrainedModel, *, tolerance: float = 2e-4, native: str = "off"
) -> Any:
    """Log-probabilities of a prompt and a greedy continuation; returns the type of the first weight, or its
    packed format; of a weight in parts, those of all.
    """
    prompt = prompt_of(33, 199)
    with closing(open_runner(folder, native=native)) as runner:
        probe = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=199)
        (job,) = Driver(runner).run([Job(prompt, num_tokens=8, sampling=probe, chunk=13)])
        model = runner.model.model if native == "required" else runner.model
        mixers = [getattr(layer.attention, "attention", layer.attention) for layer in model.layers]
        mixers = [each for each in mixers if each is not None]
        linear = next((each.qkv for each in mixers if hasattr(each, "qkv")), mixers[0].output)
        if native == "required":
            kinds = [part.struct.format for part in linear.packed_parts]
        else:
            kinds = [type(part) for part in parts_of(linear.weight)]
    expected = torch.log_softmax(reference_logits(oracle, prompt), -1)
    for position, entry in enumerate(job.prompt_logprobs):
        ours = torch.empty(199)
        ours[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        torch.testing.assert_close(ours, expected[position], atol=tolerance, rtol=0)
    assert job.output == reference_greedy(oracle, prompt, 8)
    return kinds[0] if len(kinds) == 1 else kinds


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers_with_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    settings, writer, kind = CASES[name]
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, settings, writer)
    assert assert_equals(tmp_path, oracle) == kind


def test_quantized_heads_and_experts(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "qwen2", vocab_size=208, **SIZES)
    rewrite(tmp_path, oracle, GPTQ | {"lm_head": True}, writers.gptq, head=True)
    edit_config(tmp_path, vocab_size=208)
    with closing(open_runner(tmp_path, native="off")) as runner:
        prompt = prompt_of(20, 208)
        (job,) = Driver(runner).run([Job(prompt)])
        assert isinstance(runner.model.head.weight, Int4Weight)
    assert job.output == reference_greedy(oracle, prompt, 8)


def test_int8_activations_are_rounded_when_the_checkpoint_asks(tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    settings = compressed("int-quantized", **INT8_CHANNELS, inputs=inputs)
    rewrite(tmp_path, oracle, settings, writers.int_quantized)
    with closing(open_runner(tmp_path, native="off")) as runner:
        weight = runner.model.layers[0].attention.qkv.weight
        assert isinstance(weight, Int8Weight)
        assert weight.activations == "int8"
    with pytest.raises(AssertionError):
        assert_equals(tmp_path, oracle)


def test_latent_attention_reads_quantized_projections(tmp_path: Path) -> None:
    oracle = make_checkpoint(
        tmp_path,
        "deepseek_v3",
        **SIZES,
        num_key_value_heads=4,
        first_k_dense_replace=2,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
    )
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]}
    rewrite(tmp_path, oracle, settings, writers.block_fp8)
    prompt = prompt_of(20, 199)
    (job,) = generated(tmp_path, [Job(prompt)], native="off")
    assert job.output == reference_greedy(oracle, prompt, 8)


def test_gpt_oss_experts_in_mxfp4(tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    # The family's own rotation would reach for 131,072 tokens.
    rope = {"rope_type": "yarn", "factor": 4.0, "truncate": False, "original_max_position_embeddings": 64}
    oracle = make_checkpoint(
        tmp_path, "gpt_oss", rope_parameters=rope | {"rope_theta": 1e4}, **SIZES, **sizes
    )
    tensors = writers.mxfp4_experts(tmp_path, oracle)
    assert assert_equals(tmp_path, oracle) is DenseWeight
    with closing(open_runner(tmp_path, native="off")) as runner:
        assert isinstance(runner.model.layers[0].feed_forward.experts[0].gate_up.weight, Int8Weight)
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj_scales holds numbers that are not"
    ):
        open_runner(tmp_path)


@pytest.mark.parametrize("native", ["off", "required"])
def test_one_tensor_of_one_expert_may_be_quantized(native: str, tmp_path: Path) -> None:
    sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    oracle = make_checkpoint(tmp_path, "qwen3_moe", norm_topk_prob=True, **SIZES, **sizes)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.1.gate_proj"
    stored, meaning = writers.gptq(tensors.pop(f"{name}.weight"))
    tensors |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, quantization_config=GPTQ)
    with torch.no_grad():
        oracle.model.layers[0].mlp.experts.gate_up_proj[1, :32] = meaning
    assert_equals(tmp_path, oracle, tolerance=1e-3, native=native)


def test_settings_of_older_tools_are_found(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, GPTQ, writers.gptq)
    edit_config(tmp_path, quantization_config=None)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    assert assert_equals(tmp_path, oracle) is Int4Weight
    older = {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}
    (tmp_path / "quantize_config.json").unlink()
    (tmp_path / "quant_config.json").write_text(json.dumps(older))
    scheme = read_scheme({}, str(tmp_path / "config.json"))
    assert scheme is not None
    assert (scheme.method, scheme.bits) == ("awq", 4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "hqq"}, r"quant_method = 'hqq'.*supported are awq, gptq"),
        ({}, "quantization_config.quant_method = None"),
        (AWQ | {"bits": 3}, r"quantization_config\.bits = 3 is not supported; supported are 4"),
        (AWQ | {"version": "gemv"}, r"version = 'gemv'.*gemm"),
        (GPTQ | {"bits": 2}, r"bits = 2.*4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin'.*gptq, gptq_v2"),
        (compressed("marlin-24"), r"format = 'marlin-24'.*pack-quantized"),
        (compressed("pack-quantized", num_bits=3), r"config_groups\.group_0\.weights\.num_bits = 3.*4, 8"),
        (
            compressed("int-quantized", inputs={"num_bits": 4}),
            r"input_activations\.num_bits = 4.*8",
        ),
        ({"quant_method": "compressed-tensors"}, r"config_groups = None.*table"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt = 'e5m2'.*e4m3"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size = 128"),
    ],
)
def test_unsupported_settings_are_named(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scheme({"quantization_config": settings or {"bits": 4}}, str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("qzeros", None, r"layers\.0\.self_attn\.q_proj\.qzeros.*missing"),
        ("qweight", torch.zeros(3, 3, dtype=torch.int32), r"q_proj\.qweight has shape \[3, 3\]"),
        (
            "qweight",
            torch.zeros(64, 8),
            r"tensors of model.layers.0.self_attn.q_proj are not a weight .* awq",
        ),
        (
            "scales",
            torch.zeros(()),
            r"tensors of model.layers.0.self_attn.q_proj are not a weight .* 64 x 64",
        ),
        ("scales", torch.zeros(3, 64), r"q_proj.*64 inputs do not fall into the 3 groups"),
        ("scales", torch.zeros(2, 60), r"q_proj\.scales has shape \[2, 60\]"),
    ],
)
def test_broken_tensors_are_named(
    suffix: str, tensor: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, AWQ, writers.awq)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.0.self_attn.q_proj.{suffix}"
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        open_runner(tmp_path, native="off")


def test_a_quantized_checkpoint_without_settings_is_named(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, oracle, AWQ, writers.awq)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(ConfigError, match=r"q_proj\.weight.*missing"):
        open_runner(tmp_path, native="off")
