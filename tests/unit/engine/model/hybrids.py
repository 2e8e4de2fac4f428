"""Families whose layers carry a state: small configurations, for tests that compare with transformers."""

from __future__ import annotations

from typing import Any

MIXED = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA = {
    "num_hidden_layers": 4,
    "layer_types": MIXED,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
SPARSE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 24,
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "block_multiple_of": 8,
        },
    ),
    "lfm2-bias": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "conv", "conv"],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
        },
    ),
    "qwen3-next": ("qwen3_next", DELTA | SPARSE | {"mlp_only_layers": [1]}),
    "qwen3-next-heads": (
        "qwen3_next",
        DELTA
        | SPARSE
        | {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3},
    ),
    "qwen3.5": ("qwen3_5_text", DELTA | {"tie_word_embeddings": True}),
    "qwen3.5-moe": ("qwen3_5_moe_text", DELTA | SPARSE),
    "bamba": ("bamba", MAMBA | {"attn_layer_indices": [1]}),
    "bamba-limits": (
        "bamba",
        MAMBA
        | {
            "attn_layer_indices": [2],
            "mamba_n_groups": 1,
            "time_step_limit": [0.3, 1.5],
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_chunk_size": 8,
        },
    ),
    "granite-4": (
        "granitemoehybrid",
        MAMBA | GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 40},
    ),
    "granite-4-moe": (
        "granitemoehybrid",
        MAMBA | GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            "layers_block_type": [
                *("linear_attention", "mlp", "full_attention", "mlp", "mlp", "linear_attention"),
            ],
            "head_dim": 16,
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "ssm_state_size": 20,
            "n_groups": 3,
        },
    ),
    "nemotron-h-moe": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp"],
            "head_dim": 12,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 28,
            "routed_scaling_factor": 1.5,
        },
    ),
    "nemotron-h-latent": (
        "nemotron_h",
        {
            "layers_block_type": ["moe", "linear_attention", "moe", "full_attention"],
            "head_dim": 16,
            "mlp_bias": True,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 36,
            "moe_latent_size": 20,
            "moe_shared_expert_intermediate_size": 28,
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        MAMBA
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.2,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.9, 1.2, 0.7, 1.3, 0.6],
            "mlp_multipliers": [0.8, 1.4],
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.7,
        },
    ),
    "falcon-h1-norm": (
        "falcon_h1",
        MAMBA
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
        },
    ),
    "olmo-hybrid": (
        "olmo_hybrid",
        {key: value for key, value in DELTA.items() if key != "head_dim"} | {"rope_parameters": None},
    ),
    "recurrent-gemma": (
        "recurrent_gemma",
        {
            "num_hidden_layers": 4,
            "attention_window_size": 21,
            "intermediate_size": 2 * 36,
            "num_key_value_heads": 1,
        },
    ),
    "recurrent-gemma-wide": (
        "recurrent_gemma",
        {
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 200,
            "conv1d_width": 3,
            "attention_bias": True,
            "logits_soft_cap": 5.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
        },
    ),
    "olmo-hybrid-turned": (
        "olmo_hybrid",
        {
            "num_hidden_layers": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "linear_allow_neg_eigval": False,
        },
    ),
}
