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
    "hy-v3": (
        "hy_v3",
        ROUTED | {"head_dim": 16, "num_hidden_layers": 3, "num_shared_experts": 2},
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
    "minicpm3": ("minicpm3", LATENT | {"dim_model_base": 20}),
    "minicpm3-direct": (
        "minicpm3",
        LATENT | {"q_lora_rank": None, "v_head_dim": None, "scale_depth": 0.7, "attention_bias": True},
    ),
}
