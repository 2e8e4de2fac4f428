"""Every family equals transformers in float32: logits and greedy generations, through the real runner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.model.families import FAMILIES, read_spec
from engine.model.families.table import forms_markdown, main, markdown
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.model.equality import assert_equals_transformers
from tests.unit.engine.model.gemma_cases import CASES as GEMMA_CASES
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.newer_cases import CASES as NEWER_CASES
from tests.unit.engine.runner.driver import Job, generated, prompt_of

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
CORRECTED = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
# What DeepSeek has beyond latent attention.
NOT_OF_DENSE = {"first_k_dense_replace", "moe_intermediate_size", "n_shared_experts", "num_hidden_layers"}
CORRECTED_EXAONE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "num_shared_experts": 2,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}
ATTENTION_ALONE = {
    "layer_types": ["full_attention"] * 2,
    "shared_intermediate_size": 40,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
}
NTK_ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 500.0}
PARTIAL = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
WINDOWS = ["sliding_attention", "full_attention"]

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-mqa": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 1}),
    "llama-gqa-3": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "llama-head-dim": ("llama", {"head_dim": 10}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}},
    ),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-layer-types": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "layer_types": WINDOWS}),
    "qwen3": ("qwen3", {"head_dim": 20}),
    "phi3": ("phi3", {"original_max_position_embeddings": 256, "sliding_window": 19}),
    "phi3-longrope": (
        "phi3",
        {
            "rope_parameters": {**LONGROPE, "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 3.0]},
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
        },
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 11, "num_hidden_layers": 4},
    ),
    "gemma2-no-caps": (
        "gemma2",
        {
            "head_dim": 12,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "sliding_window": 4,
        },
    ),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 7}),
    "olmo2": ("olmo2", {}),
    "olmo2-mqa": ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 12}),
    "qwen3-moe": (
        "qwen3_moe",
        {
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
            "num_hidden_layers": 3,
        },
    ),
    "qwen3-moe-sparse-step": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek-v2": ("deepseek_v2", DEEPSEEK | {"n_routed_experts": 8, "num_experts_per_tok": 2}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        DEEPSEEK
        | {
            "q_lora_rank": None,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 3.0,
        },
    ),
    "deepseek-v3": (
        "deepseek_v3",
        DEEPSEEK | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
    ),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        DEEPSEEK
        | {
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 10,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "gemma": ("gemma", {"head_dim": 16}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 3}),
    "smollm3-window": (
        "smollm3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 9, "attention_bias": True},
    ),
    "olmo3": ("olmo3", {"sliding_window": 11, "num_hidden_layers": 4}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "ministral": ("ministral", {"head_dim": 12, "sliding_window": 8, "layer_types": WINDOWS}),
    "ministral3": (
        "ministral3",
        {
            "head_dim": 16,
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "granite": ("granite", GRANITE | {"tie_word_embeddings": True}),
    "granite-moe": ("granitemoe", GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite-moe-shared": (
        "granitemoeshared",
        GRANITE | {"num_local_experts": 5, "num_experts_per_tok": 3, "shared_intermediate_size": 24},
    ),
    "granite-hybrid": (
        "granitemoehybrid",
        GRANITE | ATTENTION_ALONE | {"num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        GRANITE | ATTENTION_ALONE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-norms": ("cohere", {"use_qk_norm": True, "attention_bias": True}),
    "cohere2": ("cohere2", {"sliding_window": 9, "num_hidden_layers": 4}),
    "exaone4": ("exaone4", {"sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4-whole": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed-oss": ("seed_oss", {"head_dim": 16, "attention_out_bias": True}),
    "glm": ("glm", {"head_dim": 16, "eos_token_id": 198}),
    "glm4": ("glm4", {"head_dim": 16, "eos_token_id": 198}),
    "glm4-moe": (
        "glm4_moe",
        CORRECTED
        | {"head_dim": 16, "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7},
    ),
    "glm4-moe-lite": (
        "glm4_moe_lite",
        DEEPSEEK | CORRECTED | {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "ernie4.5": ("ernie4_5", {"head_dim": 16, "use_bias": True}),
    "ernie4.5-moe": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 4,
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 20,
            "moe_layer_interval": 2,
        },
    ),
    "ernie4.5-moe-biases": (
        "ernie4_5_moe",
        {
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "moe_num_experts": 3,
            "moe_k": 1,
            "moe_intermediate_size": 8,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 1,
            "moe_num_shared_experts": 1,
            "use_bias": True,
        },
    ),
    "hunyuan": (
        "hunyuan_v1_dense",
        {"head_dim": 16, "rope_parameters": NTK_ALPHA},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
        },
    ),
    "llama4": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "num_hidden_layers": 4,
            "floor_scale": 8,
        },
    ),
    "llama4-chunks": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 4,
            "attention_chunk_size": 12,
        },
    ),
    "llama4-listed": (
        "llama4_text",
        {
            "head_dim": 16,
            "num_local_experts": 3,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 40,
            "num_hidden_layers": 3,
            "attention_chunk_size": 12,
            "no_rope_layers": [1, 0, 1],
            "layer_types": ["full_attention", "chunked_attention", "chunked_attention"],
        },
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.5},
        },
    ),
    "dots1": ("dots1", CORRECTED),
    "mistral4": (
        "mistral4",
        DEEPSEEK
        | {
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 3,
            "routed_scaling_factor": 1.5,
            "rope_parameters": {
                **YARN,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "cwm": (
        "cwm",
        {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "rope_parameters": LLAMA3,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "helium": ("helium", {"head_dim": 12}),
    "jais2": ("jais2", {"head_dim": 12}),
    "youtu": (
        "youtu",
        {key: value for key, value in DEEPSEEK.items() if key not in NOT_OF_DENSE} | {"num_hidden_layers": 2},
    ),
    "solar-open": ("solar_open", CORRECTED | {"head_dim": 12}),
    "exaone-moe": (
        "exaone_moe",
        CORRECTED_EXAONE | {"sliding_window": 9, "sliding_window_pattern": 2, "num_hidden_layers": 4},
    ),
    "vaultgemma": (
        "vaultgemma",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 11, "num_hidden_layers": 4},
    ),
    "granite-swa": (
        "granite_swa",
        GRANITE
        | {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "layer_rope_theta": [0, 10_000.0, 500.0, 10_000.0, 0],
            "tie_word_embeddings": True,
        },
    ),
    "granite-moe-swa": (
        "granitemoe_swa",
        GRANITE
        | {
            "sliding_window": 7,
            "num_hidden_layers": 5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "hyperclovax": (
        "hyperclovax",
        GRANITE | {"residual_multiplier": 1.0},
    ),
    "hyperclovax-before-alone": (
        "hyperclovax",
        GRANITE | {"use_post_norm": False},
    ),
    "arcee": ("arcee", {"mlp_bias": True}),
    "apertus": (
        "apertus",
        {"rope_parameters": LLAMA3, "intermediate_size": 84},
    ),
    "nemotron": ("nemotron", {}),
    "stablelm": ("stablelm", {"use_qkv_bias": True, "rope_parameters": PARTIAL}),
    "stablelm-parallel": (
        "stablelm",
        {"qk_layernorm": True, "use_parallel_residual": True, "rope_parameters": PARTIAL},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 12}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 90}),
    "gpt2-inner": ("gpt2", {"n_embd": 48, "n_layer": 1, "n_head": 3, "n_positions": 256}),
    "gpt2-untied": (
        "gpt2",
        {"n_embd": 48, "n_layer": 1, "n_head": 3, "n_positions": 256, "tie_word_embeddings": False},
    ),
    "gpt-neox": ("gpt_neox", {"num_attention_heads": 3, "rope_parameters": PARTIAL}),
    "gpt-neox-serial": ("gpt_neox", {"use_parallel_residual": False, "rope_parameters": PARTIAL}),
    "phi": ("phi", {}),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "router_jitter_noise": 0.3,
            "attention_bias": True,
            "lm_head_bias": True,
            "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.2},
            "original_max_position_embeddings": 64,
            "max_position_embeddings": 64,
        },
    ),
    "kimi-linear-stretched": (
        "kimi_linear",
        HYBRIDS["kimi-linear"][1] | {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    ),
    "qwen3-biases": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    **GEMMA_CASES,
    **HYBRIDS,
    **NEWER_CASES,
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in FAMILIES
    assert_equals_transformers(tmp_path, oracle)


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_layers_that_predict_more_are_left_out_and_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    behind = f"model.layers.{oracle.config.num_hidden_layers}.eh_proj.weight"
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {behind: torch.randn(48, 96)}, path)
    edit_config(tmp_path, num_nextn_predict_layers=1)
    (job,) = generated(tmp_path, [Job(prompt_of(9, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)
    assert f"1 tensors are not served: {behind}" in caplog.text


@pytest.mark.parametrize("max_model_len", [64, 256])
def test_longrope_follows_the_served_length(max_model_len: int, tmp_path: Path) -> None:
    """Within the original length the short factors hold; an engine that serves more uses the long ones."""
    oracle = make_checkpoint(tmp_path, "llama", rope_parameters=LONGROPE)
    prompt = prompt_of(40 if max_model_len == 64 else 90, 199)
    (job,) = generated(tmp_path, [Job(prompt, num_tokens=6, chunk=16)], max_model_len=max_model_len)
    assert job.output == reference_greedy(oracle, prompt, 6)


def test_older_config_form_reads_the_same(tmp_path: Path) -> None:
    """`rope_theta` with `rope_scaling` (type or rope_type) and `torch_dtype` mean what `rope_parameters`
    means.
    """
    make_checkpoint(tmp_path, "llama", rope_parameters=LLAMA3)
    newer = read_spec(tmp_path)
    scaling = {key: value for key, value in LLAMA3.items() if key not in ("rope_theta", "rope_type")}
    for name in ("rope_type", "type"):
        edit_config(
            tmp_path,
            rope_parameters=None,
            rope_theta=10_000.0,
            rope_scaling=scaling | {name: "llama3"},
            dtype=None,
            torch_dtype="float32",
        )
        assert read_spec(tmp_path) == newer


def test_first_name_of_longrope_is_known(tmp_path: Path) -> None:
    """The first Phi-3 checkpoints call it "su"."""
    make_checkpoint(tmp_path, "llama", rope_parameters=LONGROPE)
    expected = read_spec(tmp_path).ropes
    edit_config(tmp_path, rope_parameters=LONGROPE | {"rope_type": "su"})
    assert read_spec(tmp_path).ropes == expected


def test_the_page_has_every_family() -> None:
    """To write it again: `python -m engine.model.families.table --markdown`."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page.partition("## Families\n\n")[2] == markdown()


def test_the_page_has_every_form_of_weights() -> None:
    """To write it again: `python -m engine.model.families.table --markdown --forms`."""
    page = (Path(__file__).resolve().parents[4] / "docs" / "models.md").read_text(encoding="utf-8")
    assert page.partition("## Forms of weights\n\n")[2].partition("\n\n")[0] + "\n" == forms_markdown()


def test_families_are_printed_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert "Cohere2ForCausalLM" in printed
    assert "GGUF Q6_K" in printed
    assert main(["--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["architecture"] for row in rows] == sorted(FAMILIES)
    assert all(all(row.values()) for row in rows)
