"""Small models of families of 2026, for the table of test_families."""

from __future__ import annotations

from typing import Any

TURNS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
ROUTED: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}

OPT: dict[str, Any] = {"ffn_dim": 88, "word_embed_proj_dim": 48}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": (
        "afmoe",
        ROUTED
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "num_shared_experts": 1,
            "route_scale": 1.7,
            "mup_enabled": True,
        },
    ),
    "axk1": (
        "axk1",
        LATENT | GROUPED | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "cohere2-moe": (
        "cohere2_moe",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "layer_types": ["full_attention", *TURNS[1:]],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 56,
            "intermediate_size": 40,
            "sliding_window": 9,
        },
    ),
    "cohere2-moe-sums": (
        "cohere2_moe",
        {
            "head_dim": 12,
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "num_shared_experts": 1,
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "sigmoid",
            "rms_norm_eps": 1e-5,
            "sliding_window": 7,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-unified": (
        "gemma4_unified_text",
        {
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 9,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4-unified-seeing": (
        "gemma4_unified",
        {
            "text_config": {
                "head_dim": 16,
                "global_head_dim": 24,
                "sliding_window": 9,
                "num_kv_shared_layers": 1,
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                "pad_token_id": 0,
            },
            "vision_config": {
                "patch_size": 4,
                "mm_embed_dim": 16,
                "mm_posemb_size": 8,
                "output_proj_dims": 16,
            },
            "audio_config": None,
        },
    ),
    "hy-v3": (
        "hy_v3",
        ROUTED | {"head_dim": 16, "num_hidden_layers": 3, "num_shared_experts": 2},
    ),
    "laguna": (
        "laguna",
        ROUTED
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": TURNS,
            "num_attention_heads_per_layer": [4, 2, 6, 4],
            "shared_expert_intermediate_size": 24,
            "moe_routed_scaling_factor": 1.7,
            "sliding_window": 9,
        },
    ),
    "laguna-elements": (
        "laguna",
        ROUTED
        | {
            "head_dim": 12,
            "gating": "per-element",
            "mlp_layer_types": ["sparse", "dense"],
            "shared_expert_intermediate_size": 24,
            "rope_parameters": THETAS,
        },
    ),
    "lfm3": (
        "lfm3",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention"],
            "sliding_window": 9,
        },
    ),
    "lfm3-plain": (
        "lfm3",
        {
            "head_dim": 12,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "conv", "full_attention"],
            "sliding_window": 7,
            "conv_bias": True,
            "conv_L_cache": 3,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "rope_parameters": THETAS,
            "tie_word_embeddings": False,
        },
    ),
    "mellum": (
        "mellum",
        ROUTED
        | {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "layer_types": TURNS,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "sliding_window": 9,
            "rope_parameters": THETAS,
        },
    ),
    "mimo-v2": (
        "mimo_v2_flash",
        {
            "head_dim": 24,
            "v_head_dim": 10,
            "num_hidden_layers": 4,
            "layer_types": TURNS,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "minicpm3": ("minicpm3", LATENT | {"dim_model_base": 20}),
    "minicpm3-direct": (
        "minicpm3",
        LATENT | {"q_lora_rank": None, "v_head_dim": None, "scale_depth": 0.7, "attention_bias": True},
    ),
    "flint": (
        "flint",
        {
            "num_hidden_layers": 6,
            "head_dim": 12,
            "sliding_window": 9,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "flint-stated": (
        "flint",
        {
            "num_hidden_layers": 3,
            "head_dim": 20,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 28,
        },
    ),
    "flex-olmo": ("flex_olmo", {"num_experts": 5, "num_experts_per_tok": 2}),
    "flex-olmo-normalized": (
        "flex_olmo",
        {"num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True, "num_key_value_heads": 1},
    ),
    "nanochat": ("nanochat", {"final_logit_softcapping": 5.0}),
    "nanochat-plain": (
        "nanochat",
        {
            "final_logit_softcapping": None,
            "attention_bias": True,
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
        },
    ),
    # And some of earlier years.
    "falcon": ("falcon", {"bias": True, "ffn_hidden_size": 88}),
    "falcon-groups": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "tie_word_embeddings": False},
    ),
    "falcon-one-norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-serial": ("falcon", {"multi_query": False, "parallel_attn": False}),
    "gptj": ("gptj", {"n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 256, "rotary_dim": 6}),
    "olmo": ("olmo", {"attention_bias": True}),
    "opt": ("opt", OPT),
    "opt-plain": (
        "opt",
        OPT
        | {
            "num_attention_heads": 3,
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
    ),
}
