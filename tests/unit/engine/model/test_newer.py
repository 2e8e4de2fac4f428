"""Checkpoints of families of 2026 as they are published, where transformers saves them otherwise."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.spec import CheckpointError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.newer_cases import CASES
from tests.unit.engine.runner.driver import Job, generated, prompt_of


def renamed(folder: Path, pattern: str, to: str) -> int:
    """Renames the checkpoint's tensors; the number of those whose names match."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({re.sub(pattern, to, name): tensor for name, tensor in tensors.items()}, path)
    return sum(bool(re.search(pattern, name)) for name in tensors)


@pytest.mark.parametrize(
    ("name", "pattern", "to"),
    [
        ("axk1", r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),
        ("axk1", r"(?<!mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),
        ("laguna", r"\.mlp\.gate\.e_score_", ".mlp.experts.e_score_"),
        ("laguna", r"\.mlp\.experts\.e_score_", ".mlp.gate.e_score_"),
        ("laguna", r"\.mlp\.shared_experts\.", ".mlp.shared_expert."),
        ("lfm3", r"\.self_attn\.gate_proj\.", ".self_attn.g_proj."),
        ("lfm3", r"\.self_attn\.g_proj\.", ".self_attn.gate_proj."),
        ("mimo-v2", r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),
        ("mimo-v2", r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),
        ("hy-v3", r"\.mlp\.gate\.", ".mlp.router.gate."),
        ("hy-v3", r"\.mlp\.router\.gate\.", ".mlp.gate."),
        ("hy-v3", r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
        ("hy-v3", r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        ("hy-v3", r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
    ],
)
def test_either_name_is_known(name: str, pattern: str, to: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    renamed(tmp_path, pattern, to)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


def test_choices_that_nothing_corrects_and_norms_that_nothing_uses(tmp_path: Path) -> None:
    """A.X K1 is published without corrections, and with the norm behind experts in dense layers as well."""
    model_type, changes = CASES["axk1"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    for name, tensor in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
    path = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(path).items() if "correction" not in name}
    assert len(tensors) < len(load_file(path))
    save_file(tensors | {"model.layers.0.post_mlp_layernorm.weight": torch.randn(48)}, path)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


def test_the_layer_that_drafts_is_left_out(tmp_path: Path) -> None:
    model_type, changes = CASES["hy-v3"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.randn(48, 96)}, path)
    (job,) = generated(tmp_path, [Job(prompt_of(9, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


@pytest.mark.parametrize(
    "name",
    ["laguna", "lfm3", "mimo-v2", "afmoe", "kimi-linear", "bailing", "minimax-factors", "jamba", "mamba"],
)
@pytest.mark.parametrize("quantize", ["int8", "w8a8"])
def test_new_parts_of_layers_are_quantized_as_others(name: str, quantize: str, tmp_path: Path) -> None:
    model_type, changes = (CASES | HYBRIDS)[name]
    make_checkpoint(tmp_path, model_type, **changes)
    for options in ({"native": "required"}, {"attention_backend": "torch"}):
        (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=3)], quantize=quantize, **options)
        assert len(job.output) == 3


def test_published_configurations_of_mimo_say_the_same(tmp_path: Path) -> None:
    """They have lists of ones, and a window that leaves out a token's own position."""
    model_type, changes = CASES["mimo-v2"]
    make_checkpoint(tmp_path, model_type, **changes)
    edit_config(tmp_path, rope_parameters=None)
    saved = read_spec(tmp_path)
    edit_config(
        tmp_path,
        layer_types=None,
        mlp_layer_types=None,
        sliding_window=None,
        hybrid_layer_pattern=[1, 1, 0, 1],
        moe_layer_freq=[0, 1, 1, 1],
        sliding_window_size=8,
        rope_theta=5_000_000.0,
        swa_rope_theta=10_000.0,
        partial_rotary_factor=0.334,
        swa_num_key_value_heads=2,
        swa_head_dim=24,
        swa_v_head_dim=10,
    )
    assert read_spec(tmp_path) == saved


def test_published_configurations_of_kimi_linear_and_minimax_say_the_same(tmp_path: Path) -> None:
    """Kimi Linear's layers are counted from one; MiniMax-Text-01 has ones for layers that attend."""
    kimi, minimax = tmp_path / "kimi", tmp_path / "minimax"
    make_checkpoint(kimi, HYBRIDS["kimi-linear"][0], **HYBRIDS["kimi-linear"][1])
    saved, unsaid = read_spec(kimi), dict.fromkeys(("layer_types", "mlp_layer_types", "linear_head_dim"))
    published = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 3}
    edit_config(kimi, **unsaid, linear_num_heads=None, linear_attn_config=published, first_k_dense_replace=1)
    assert read_spec(kimi) == saved
    make_checkpoint(minimax, HYBRIDS["minimax-factors"][0], **HYBRIDS["minimax-factors"][1])
    saved, unsaid = read_spec(minimax), {"layer_types": None}
    given = json.loads((minimax / "config.json").read_text())
    older = {}
    for ours, theirs in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    ):
        for part in ("alpha", "beta"):
            unsaid[f"{ours}_{part}_factor"] = None
            older[f"layernorm_{theirs}_{part}"] = given[f"{ours}_{part}_factor"]
    architectures = ["MiniMaxText01ForCausalLM"]
    edit_config(
        minimax, **unsaid, **older, architectures=architectures, attn_type_list=[0, 0, 1, 0, 0], postnorm=True
    )
    assert msgspec.structs.replace(read_spec(minimax), architecture=saved.architecture) == saved


@pytest.mark.parametrize(
    ("architecture", "keys", "refused"),
    [
        ("InternLM3ForCausalLM", {"qkv_bias": False, "bias": False}, {"bias": True}),
        ("IQuestCoderForCausalLM", {"clip_qkv": None}, {"clip_qkv": 8.0}),
        ("IQuestCoderForCausalLM", {"use_sliding_window": False}, {"use_sliding_window": True}),
    ],
)
def test_llamas_of_other_names(
    architecture: str, keys: dict[str, Any], refused: dict[str, Any], tmp_path: Path
) -> None:
    """As they are published; transformers reads them as Llama."""
    oracle = make_checkpoint(tmp_path, "llama", head_dim=20)
    edit_config(tmp_path, architectures=[architecture], attention_bias=None, mlp_bias=None, **keys)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)
    edit_config(tmp_path, **refused)
    with pytest.raises(CheckpointError, match=r"mlp_bias = True|clip_qkv|use_sliding_window"):
        read_spec(tmp_path)


def test_smaller_values_take_less_memory(tmp_path: Path) -> None:
    """One layer has one head of keys and values, three have two."""
    model_type, changes = CASES["mimo-v2"]
    make_checkpoint(tmp_path, model_type, **changes)
    assert kv_bytes_per_token(read_spec(tmp_path), "float32") == (1 + 3 * 2) * (24 + 10) * 4


@pytest.mark.parametrize(
    ("name", "keys", "said"),
    [
        ("laguna", {"gating": "per-layer"}, "gating"),
        ("laguna", {"moe_router_logit_softcapping": 3.0}, "moe_router_logit_softcapping"),
        ("laguna", {"num_attention_heads_per_layer": [4, 3, 6, 4]}, "num_attention_heads_per_layer = 3"),
        ("lfm3", {"layer_types": ["conv", "mamba", "conv", "conv", "conv"]}, "layer_types must name 5"),
        ("mimo-v2", {"swa_v_head_dim": 12}, "swa_v_head_dim"),
        ("mimo-v2", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias"),
        ("mimo-v2", {"swa_num_key_value_heads": 3}, "swa_num_key_value_heads = 3"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(
    name: str, keys: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    edit_config(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=said):
        read_spec(tmp_path)
