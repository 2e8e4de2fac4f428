"""GGUF files give the logits of transformers' model with the weights that they stand for."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from checkpoint.files import find
from checkpoint.gguf_parts import part_names
from checkpoint.vocabulary import checkpoint_fingerprint
from engine.config import EngineConfig
from engine.model.checkpoint import read_headers
from engine.model.families import read_spec
from engine.model.plan import make_plan, plan_input
from kernels.linear.formats import DenseWeight, Int4Weight, Int8Weight
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.supervisor import checkpoint
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.quantization.gguf_writer import Encoder, write
from tests.unit.engine.quantization.k_quants import q4_k, q6_k
from tests.unit.engine.quantization.test_stored import assert_equals
from tokenizer_svc.text.checkpoint import locate

THETA = {"rope_type": "default", "rope_theta": 500.0}
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "rope_parameters": THETA}
WIDE = SIZES | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("kind", "form", "sizes"),
    [
        (Kind.F32, DenseWeight, SIZES),
        (Kind.F16, DenseWeight, SIZES),
        (Kind.BF16, DenseWeight, SIZES),
        (Kind.Q8_0, Int8Weight, SIZES),
        (Kind.Q4_0, Int4Weight, SIZES),
        (Kind.Q4_1, Int4Weight, SIZES),
        (Kind.Q5_0, DenseWeight, SIZES),
        (Kind.Q4_K, Int4Weight, WIDE),
        (Kind.Q5_K, DenseWeight, WIDE),
        (Kind.Q6_K, DenseWeight, WIDE),
    ],
)
def test_types(kind: Kind, form: type, sizes: dict[str, Any], tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **sizes)
    path = tmp_path / "model.gguf"
    write(path, oracle, "llama", {"": kind})
    assert assert_equals(path, oracle) is form
    if kind is Kind.F32:
        # The same weights as before the conversion: rows of q and k are back in place.
        assert (
            assert_equals(path, transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "original"))
            is form
        )


def test_mixed_types_as_in_q4_k_m(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K, "": Kind.Q4_K}
    write(tmp_path / "model.gguf", oracle, "llama", kinds)
    assert assert_equals(tmp_path / "model.gguf", oracle, tolerance=1e-3) == [Int4Weight, DenseWeight]


@pytest.mark.parametrize(("kind", "encode", "error"), [(Kind.Q4_K, q4_k, 0.06), (Kind.Q6_K, q6_k, 0.025)])
def test_numbers_in_blocks_of_256(kind: Kind, encode: Encoder, error: float) -> None:
    # Groups of all sizes, one that is constant, and one of zeros.
    draw = np.random.default_rng(0)
    values = draw.normal(size=(3, 2, 16, 16)).astype(np.float32)
    values *= draw.uniform(0.2, 1, (3, 2, 16, 1))
    values[0, 0, :2], values[1, 0] = 0.5, 0
    values = values.reshape(3, 512)
    read = gguf.quants.dequantize(encode(values), kind)
    assert np.abs(read - values).max() <= error * np.abs(values).max()
    assert not read[1, :256].any()


def test_own_weights_in_k_types(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "": Kind.Q4_K}
    rounded = {Kind.Q4_K: q4_k, Kind.Q6_K: q6_k}
    write(tmp_path / "model.gguf", oracle, "llama", kinds, rounded=rounded)
    assert_equals(tmp_path / "model.gguf", oracle, tolerance=1e-3)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500.0}
ROPES = ["sliding_attention", "full_attention"]
FAMILIES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama bias": ("llama", "llama", {"attention_bias": True, "tie_word_embeddings": True}, {}),
    "mistral": ("mistral", "llama", {"sliding_window": None}, {}),
    "mixtral": (
        "mixtral",
        "llama",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", "qwen2", {}, {}),
    "qwen2 yarn": (
        "qwen2",
        "qwen2",
        {"rope_parameters": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 20}, {}),
    "qwen3moe": (
        "qwen3_moe",
        "qwen3moe",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9},
        {
            "attention.sliding_window": 9,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "gemma3_text",
        "gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 9,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        {"attention.sliding_window": 9, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
    ),
    "olmo2": ("olmo2", "olmo2", {}, {}),
    "olmo3": (
        "olmo3",
        "olmo2",
        {
            "sliding_window": 9,
            "layer_types": ROPES,
            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), THETA),
        },
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]},
    ),
    "olmoe": (
        "olmoe",
        "olmoe",
        {"num_experts": 4, "num_experts_per_tok": 2},
        {"expert_count": 4, "expert_used_count": 2},
    ),
    "qwen2moe": (
        "qwen2_moe",
        "qwen2moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 32,
            "expert_shared_feed_forward_length": 64,
        },
    ),
    "arcee": ("arcee", "arcee", {}, {}),
    "cohere": ("cohere", "command-r", {"logit_scale": 0.3, "use_qk_norm": True}, {"logit_scale": 0.3}),
    "cohere2": (
        "cohere2",
        "cohere2",
        {"logit_scale": 0.3, "sliding_window": 9, "num_hidden_layers": 4},
        {"logit_scale": 0.3, "attention.sliding_window": 9},
    ),
    "ernie4.5": ("ernie4_5", "ernie4_5", {"head_dim": 16}, {}),
    "exaone4": (
        "exaone4",
        "exaone4",
        {"sliding_window": 9, "layer_types": ROPES},
        {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False]},
    ),
    "gemma": ("gemma", "gemma", {"head_dim": 16}, {}),
    "glm4": (
        "glm4",
        "glm4",
        {"head_dim": 16, "eos_token_id": 198, "rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
    "granite": (
        "granite",
        "granite",
        {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.3,
            "logits_scaling": 2.0,
        },
        {"embedding_scale": 3.0, "attention.scale": 0.4, "residual_scale": 0.3, "logit_scale": 2.0},
    ),
    "hunyuan": ("hunyuan_v1_dense", "hunyuan-dense", {"head_dim": 16}, {}),
    "nemotron": (
        "nemotron",
        "nemotron",
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
    "phi2": (
        "phi",
        "phi2",
        {"rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 8},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {"head_dim": 16}, {}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 4}, {}),
    "starcoder2": ("starcoder2", "starcoder2", {}, {}),
    "phi3": ("phi3", "phi3", {"sliding_window": 19}, {"attention.sliding_window": 19}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str, tmp_path: Path) -> None:
    model_type, arch, changes, metadata = FAMILIES[name]
    oracle = make_checkpoint(tmp_path / "original", model_type, **SIZES | changes)
    if model_type in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        kinds = {"ffn_gate_inp": Kind.F32, "": Kind.F16}
        write_experts(tmp_path / "model.gguf", oracle, arch, kinds, metadata)
    else:
        write(tmp_path / "model.gguf", oracle, arch, {"": Kind.F32}, metadata)
    assert_equals(tmp_path / "model.gguf", oracle)


def write_experts(
    path: Path, oracle: Any, arch: str, kinds: Any, metadata: Any, types: Mapping[str, Kind] | None = None
) -> None:
    """Experts are three tensors in GGUF, of these `types`, and gate and up are one in transformers."""
    extra: dict[str, Any] = {}
    held = {}
    for layer, module in enumerate(oracle.model.layers):
        experts = module.mlp.experts if hasattr(module, "mlp") else module.block_sparse_moe.experts
        gate, up = experts.gate_up_proj.detach().numpy().copy().reshape(4, 2, -1, 64).swapaxes(0, 1)
        down = experts.down_proj.detach().numpy().copy()
        meant = {}
        for part, values in (("gate", gate), ("up", up), ("down", down)):
            kind = (types or {}).get(part, Kind.F32)
            data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
            meant[part] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
            extra[f"blk.{layer}.ffn_{part}_exps.weight"] = data, kind
        with torch.no_grad():
            experts.gate_up_proj.copy_(torch.cat((meant["gate"], meant["up"]), dim=1))
            experts.down_proj.copy_(meant["down"])
        held[layer] = (experts, experts.gate_up_proj, experts.down_proj)
        del experts.gate_up_proj, experts.down_proj
    write(path, oracle, arch, kinds, metadata, extra)
    for experts, gate_up, down_proj in held.values():
        experts.gate_up_proj, experts.down_proj = gate_up, down_proj


def test_llama3_rotation_is_read_from_its_factors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    oracle = make_checkpoint(tmp_path / "original", "llama", **SIZES | {"rope_parameters": scaling})
    plain = 500.0 ** (-np.arange(0, 16, 2) / 16)
    factors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 1.5
    write(tmp_path / "model.gguf", oracle, "llama", {"": Kind.F32}, extra={"rope_freqs.weight": factors})
    assert_equals(tmp_path / "model.gguf", oracle)


def test_quantized_weights_are_planned_as_stored(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **WIDE)
    sizes = {}
    for kind in (Kind.F16, Kind.Q8_0, Kind.Q4_0):
        path = tmp_path / f"{kind.name}.gguf"
        write(path, oracle, "llama", {"token_embd": Kind.F16, "": kind})
        config = EngineConfig(dtype="bfloat16")
        given = plan_input(config, ModelConfig(path=str(path)), device="cpu", available_bytes=8 << 30)
        assert given.num_weights == oracle.num_parameters()
        sizes[kind] = make_plan(given).weights_bytes
    linear = sum(m.weight.numel() for m in oracle.modules() if isinstance(m, torch.nn.Linear))
    assert sizes[Kind.F16] - sizes[Kind.Q8_0] == linear * (2 - 1.125)
    assert sizes[Kind.F16] - sizes[Kind.Q4_0] == linear * (2 - 0.625)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **SIZES)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.gguf", oracle, "llama", {"": Kind.F16})
    assert find(str(folder)) == folder / "a.gguf"
    spec = read_spec(folder / "a.gguf")
    assert (spec.eos_token_ids, spec.dtype, spec.quantization) == ((7,), "float16", None)
    (folder / "b.gguf").write_bytes((folder / "a.gguf").read_bytes())
    with pytest.raises(ConfigError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name one"):
        find(str(folder))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(str(path), "bloom")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"general\.architecture = 'bloom' is not supported; .*llama"):
        read_spec(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"other\.gguf is not a whole GGUF.*copy or download"):
        read_headers(path)
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.gguf is missing"):
        read_headers(first)


def test_damage_is_named(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **SIZES)
    path = tmp_path / "model.gguf"
    write(path, oracle, "llama", {"": Kind.Q8_0})
    whole = path.read_bytes()
    assert read_spec(path).num_heads == 4
    for content, message in (
        (whole[:-100], "is not a whole GGUF file"),
        (whole[: len(whole) // 3], "is not a whole GGUF file"),
        (whole.replace(b"token_embd.weight", b"token_embe.weight"), "model.embed_tokens.weight is missing"),
        (whole.replace(b"attn_output.weight", b"attn_outpux.weight"), "o_proj.weight is missing"),
        (
            whole.replace(b"llama.attention.head_count", b"llama.attention.head_counx"),
            "llama.attention.head_count is missing",
        ),
        (
            whole.replace(b"llama.embedding_length", b"llama.embedding_lengtx"),
            "llama.embedding_length is missing",
        ),
    ):
        path.write_bytes(content)
        os.utime(path, ns=(time.time_ns(), time.time_ns()))
        with pytest.raises(ConfigError, match=message):
            read_spec(path)


def test_every_service_finds_the_tokenizer_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    shutil.copy("models/millrace-nano/tokenizer.json", tmp_path)
    assert checkpoint.resolve(str(file)) == file
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    assert locate(ModelConfig(path=str(file)), simulated=False) == file
    assert locate(ModelConfig(path=str(tmp_path)), simulated=False) == file
    assert checkpoint_fingerprint(file) == checkpoint_fingerprint("models/millrace-nano")


def test_split_files_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path / "original", "llama", **SIZES)
    write(tmp_path / "model.gguf", oracle, "llama", {"": Kind.F16}, split=8)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == part_names(parts[0].name)
    assert len(parts) > 2
    assert find(str(parts[1])) == parts[0]
    assert_equals(parts[2], oracle)
    assert {header.file for header in read_headers(parts[0]).values()} == {part.name for part in parts}
    parts[-1].write_bytes(parts[1].read_bytes())
    os.utime(parts[0], ns=(time.time_ns(), time.time_ns()))
    with pytest.raises(ConfigError, match=rf"{parts[-1].name}: tensor .* is in {parts[1].name} already"):
        read_headers(parts[0])
