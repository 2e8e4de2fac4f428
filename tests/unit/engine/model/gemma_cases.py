"""Small models of Gemma 3n and 4, for the table of test_families."""

from __future__ import annotations

from typing import Any

TURNS = ["sliding_attention", "full_attention"] * 3
GEMMA4: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": TURNS,
    "vocab_size_per_layer_input": 199,
    "hidden_size_per_layer_input": 12,
}
WITHOUT_INPUTS = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2, "layer_types": TURNS[:2]}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
PROPORTIONAL = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 700.0,
        "partial_rotary_factor": 0.6,
        "factor": 2.0,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
}
GEMMA3N: dict[str, Any] = {
    "head_dim": 16,
    "sliding_window": 9,
    "num_hidden_layers": 6,
    "layer_types": TURNS,
    "vocab_size_per_layer_input": 150,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 3,
    "laurel_rank": 7,
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "position_embedding_size": 16,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("gemma3n_text", GEMMA3N),
    "gemma3n-sparse": (
        "gemma3n_text",
        GEMMA3N
        | {
            "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.9, 0.0],
            "intermediate_size": [88, 88, 40, 88, 64, 88],
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
        },
    ),
    "gemma4": ("gemma4_text", GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    "gemma4-keys-are-values": (
        "gemma4_text",
        GEMMA4
        | WITHOUT_INPUTS
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 20.0},
    ),
    "gemma4-experts": ("gemma4_text", GEMMA4 | WITHOUT_INPUTS | EXPERTS | {"rope_parameters": PROPORTIONAL}),
    "gemma4-everything": (
        "gemma4_text",
        GEMMA4
        | EXPERTS
        | {
            "num_kv_shared_layers": 3,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 4,
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4-seeing": (
        "gemma4",
        {
            "text_config": GEMMA4 | {"num_kv_shared_layers": 2, "pad_token_id": 0},
            "vision_config": VISION,
            "audio_config": None,
        },
    ),
}
