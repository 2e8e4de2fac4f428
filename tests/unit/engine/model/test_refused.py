"""What a family would compute otherwise than transformers is refused by the name of its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.model.families import read_spec
from engine.model.spec import CheckpointError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import open_runner


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("olmoe", {"clip_qkv": 8.0}),
        ("phi", {"qk_layernorm": True}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("hunyuan", {"use_cla": True}),
        ("cohere2", {"use_parallel_block": False}),
        ("minimax-m2", {"attn_type_list": [1, 0]}),
        ("granite-hybrid", {"layer_types": ["attention", "rwkv"]}),
        ("dots1", {"moe_layer_freq": 2}),
        ("granite-swa", {"layer_rope_theta": [0, 10_000.0]}),
        ("granite-swa", {"layer_rope_theta": [0, -1.0, 1, 1, 1]}),
        ("hyperclovax", {"residual_multiplier": 0.5}),
        ("starcoder2", {"norm_type": "rms_norm"}),
        ("afmoe", {"attention_bias": True}),
        ("axk1", {"q_lora_rank": 0}),
        ("cohere2-moe", {"expert_selection_fn": "sinkhorn"}),
        ("cohere2-moe", {"shared_expert_combination_strategy": "max"}),
        ("mellum", {"mlp_layer_types": ["sparse", "linear"]}),
        ("minicpm3", {"scale_depth": 0}),
        ("falcon", {"alibi": True}),
        ("gptj", {"rotary_dim": 7}),
        ("olmo", {"clip_qkv": 8.0}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 24}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}),
        ("gemma2", {"query_pre_attn_scalar": 0}),
        ("gemma3", {"attn_logit_softcapping": 4.0}),
        ("apertus", {"mlp_bias": True}),
        ("gemma3", {"sliding_window_pattern": 0, "layer_types": None}),
        ("mistral-window", {"sliding_window": 0}),
        ("qwen3-next", {"mlp_only_layers": 1}),
        ("llama4", {"moe_layers": 1}),
        ("phi3", {"rope_parameters": 1}),
        ("bamba", {"intermediate_size": 0}),
        ("bamba", {"num_hidden_layers": 10**9}),
        ("lfm2", {"intermediate_size": 1}),
        ("lfm2", {"conv_L_cache": 1}),
        ("ministral3", {"head_dim": 13}),
        ("deepseek-v3", {"qk_rope_head_dim": 7}),
        ("deepseek-v3", {"n_group": 3}),
        ("deepseek-v3", {"n_group": 8}),
        ("deepseek-v3", {"topk_group": 0}),
        ("deepseek-v3", {"topk_group": 5}),
        ("deepseek-v3", {"num_experts_per_tok": 5}),
        ("mixtral", {"num_experts_per_tok": 5}),
        ("falcon-h1", {"partial_rotary_factor": 0.5}),
        ("granite-swa", {"sliding_window": 0}),
        ("lfm3", {"sliding_window": 0}),
        ("minimax", {"partial_rotary_factor": 0.5}),
        ("minimax", {"full_attn_beta_factor": 0}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("deepseek-v3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    edit_config(tmp_path, **keys)
    key = next(iter(keys))
    with pytest.raises(CheckpointError, match=key):
        read_spec(tmp_path)


@pytest.mark.parametrize("name", ["bailing", "nemotron-h", "jamba"])
def test_a_share_that_turns_is_nothing_where_no_heads_turn(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    expected = read_spec(tmp_path)
    edit_config(tmp_path, partial_rotary_factor=0.5)
    assert read_spec(tmp_path) == expected


@pytest.mark.parametrize("name", ["nemotron-h", "llama"])
def test_a_head_beside_the_embedding_that_it_is_said_to_be_is_the_same(name: str, tmp_path: Path) -> None:
    """Transformers computes with such a head if it differs, and so it is not left out."""
    model_type, changes = CASES[name]
    make_checkpoint(tmp_path, model_type, **changes)
    edit_config(tmp_path, tie_word_embeddings=True)
    for options in ({"native": "required"}, {"attention_backend": "torch"}):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is not the embedding.*to false"):
            open_runner(tmp_path, **options)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    embedding = next(value for key, value in tensors.items() if "embed" in key)
    save_file(tensors | {"lm_head.weight": embedding.clone()}, path)
    open_runner(tmp_path, native="required").close()
