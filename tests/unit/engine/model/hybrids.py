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
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
KDA = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 20,
}
MAMBA = {
    "num_hidden_layers": 3,
    "mamba_n_heads": 8,
    "mamba_d_head": 12,
    "mamba_d_state": 20,
    "mamba_n_groups": 2,
}
MAMBA2 = {
    "num_hidden_layers": 3,
    "intermediate_size": 2 * 48,
    "num_heads": 8,
    "head_dim": 12,
    "n_groups": 2,
    "state_size": 20,
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
    "kimi-linear": ("kimi_linear", KDA),
    "kimi-linear-heads": (
        "kimi_linear",
        KDA
        | {
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "linear_head_dim": 20,
            "linear_num_heads": 5,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 24,
            "num_shared_experts": 2,
            "moe_renormalize": False,
            "attention_bias": True,
        },
    ),
    "bailing": (
        "bailing_hybrid",
        KDA | {"num_hidden_layers": 3, "head_dim": 12, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "bailing-soft": (
        "bailing_hybrid",
        {key: value for key, value in KDA.items() if not key.startswith("linear_")}
        | {"kda_safe_gate": False, "head_dim": 20, "num_attention_heads": 5, "num_key_value_heads": 5},
    ),
    "minimax": ("minimax", {"num_hidden_layers": 4, "head_dim": 12} | EXPERTS),
    "minimax-factors": (
        "minimax",
        EXPERTS
        | {
            "num_hidden_layers": 5,
            "layer_types": [
                "linear_attention",
                "linear_attention",
                "full_attention",
                *["linear_attention"] * 2,
            ],
            "head_dim": 20,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "sliding_window": 11,
            "block_size": 8,
            **{f"{kind}_alpha_factor": 3.5 for kind in ("full_attn", "linear_attn", "mlp")},
            "full_attn_beta_factor": 0.7,
            "linear_attn_beta_factor": 1.2,
            "mlp_beta_factor": 0.9,
        },
    ),
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
    "olmo-hybrid-still": (
        "olmo_hybrid",
        {"num_hidden_layers": 2, "rope_parameters": {"rope_type": "default", "rope_theta": None}},
    ),
    "jamba": (
        "jamba",
        EXPERTS | {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4},
    ),
    "jamba-dense": (
        "jamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 6,
            "mamba_d_conv": 3,
            "mamba_dt_rank": 5,
            "mamba_expand": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
        },
    ),
    # Without any layer that attends.
    "jamba-keyless": (
        "jamba",
        EXPERTS | {"num_hidden_layers": 3, "attn_layer_period": 9, "attn_layer_offset": 5, "num_experts": 4},
    ),
    "recurrent-gemma-keyless": (
        "recurrent_gemma",
        {"num_hidden_layers": 2, "block_types": ["recurrent"], "intermediate_size": 72},
    ),
    "nemotron-h-keyless": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "ssm_state_size": 20,
            "n_groups": 3,
        },
    ),
    "mamba": ("mamba", {"intermediate_size": 2 * 48, "state_size": 12}),
    "mamba-wide": (
        "mamba",
        {
            "num_hidden_layers": 3,
            "intermediate_size": 3 * 48,
            "expand": 3,
            "state_size": 6,
            "conv_kernel": 3,
            "time_step_rank": 5,
            "use_bias": True,
            "use_conv_bias": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-mamba": ("falcon_mamba", {"num_hidden_layers": 3, "intermediate_size": 96}),
    "falcon-mamba-norms": ("falcon_mamba", {"intermediate_size": 96, "mixer_rms_eps": 0.1}),
    "mamba2": ("mamba2", MAMBA2),
    "mamba2-whole": ("mamba2", MAMBA2 | {"n_groups": 1, "use_bias": True, "tie_word_embeddings": True}),
    "mamba2-limits": (
        "mamba2",
        MAMBA2
        | {
            "n_groups": 1,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_limit": [0.3, 1.5],
            "chunk_size": 8,
            "tie_word_embeddings": True,
        },
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
