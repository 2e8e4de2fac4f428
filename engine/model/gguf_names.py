"""Names of GGUF's tensors, and those that layers ask for. No torch."""

from __future__ import annotations

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "position_embd": "model.embed_positions",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
    # LFM2's only norm outside of layers, which is behind the last one.
    "token_embd_norm": "model.norm",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_experts_gate",
    "shortconv.conv": "state.conv1d",
    "shortconv.in_proj": "state.in_proj",
    "shortconv.out_proj": "state.out_proj",
    "ssm_in": "state.in_proj",
    "ssm_conv1d": "state.conv1d",
    "ssm_norm": "state.norm",
    "ssm_out": "state.out_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    # Whole names.
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "state.A_log",
    "ssm_d": "state.D",
    "ssm_dt.bias": "state.dt_bias",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PER_LAYER = _SANDWICH | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_GEMMA3N = _PER_LAYER | {
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = _PER_LAYER | {
    "layer_output_scale": "layer_scalar",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.{}.gate_up_proj",
    "ffn_down_exps": "experts.{}.down_proj",
    # Vectors that bear the names of the products that they belong to.
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_LATER = {"post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = _LATER | {"attn_sinks.weight": "self_attn.sinks"}
_DELTA = _LATER | {
    "attn_qkv": "state.in_proj_qkv",
    "attn_gate": "state.in_proj_z",
    "ssm_beta": "state.in_proj_b",
    "ssm_alpha": "state.in_proj_a",
}
_JAMBA = {
    "ssm_x": "state.x_proj",
    "ssm_dt": "state.dt_proj",
    "ssm_dt.bias": "state.dt_proj.bias",
    **{f"ssm_{part}_norm": f"state.{part}_layernorm" for part in ("dt", "b", "c")},
}
_KIMI = {
    **{f"ssm_conv1d_{part}": f"state.{part}_conv1d" for part in "qkv"},
    "ssm_beta": "state.b_proj",
    "ssm_f_a": "state.a_proj",
    "ssm_f_b": "state.a_up_proj",
    "ssm_g_a": "state.g_proj",
    "ssm_g_b": "state.g_up_proj",
}
# Layers with a state call what they project as attention does.
SAME_NAMES = frozenset({"kimi-linear"})
# Layers are half layers, of which those that feed forward are told from the others by their tensors.
HALVES = frozenset({"nemotron_h", "nemotron_h_moe"})
_LATENT_EXPERTS = {"ffn_latent_down": "mlp.fc1_latent_proj", "ffn_latent_up": "mlp.fc2_latent_proj"}
# Architecture to names that differ from the common ones.
NAMES: dict[str, dict[str, str]] = {
    "llama": _MIXTRAL,
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": {},
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "olmo2": _SANDWICH,
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "exaone4": _SANDWICH,
    "glm4": _SANDWICH | {"ffn_up": "mlp.gate_up_proj"},
    "seed_oss": _LATER,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _LATENT_EXPERTS),
    "glm4moe": _LATER,
    **dict.fromkeys(("jamba", "mamba"), _JAMBA),
    "kimi-linear": _KIMI,
    "gpt-oss": _GPT_OSS,
    "mistral4": {"ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj"},
    "phimoe": _MIXTRAL,
    "minimax-m2": _MIXTRAL | {"exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias"},
    "stablelm": {"attn_q_norm": "self_attn.q_norm.norms.{}", "attn_k_norm": "self_attn.k_norm.norms.{}"},
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _DELTA),
    **{
        name: {}
        for name in (
            *("apertus", "arcee", "cohere2", "command-r", "ernie4_5", "gemma", "granite", "hunyuan-dense"),
            *("nemotron", "olmoe", "phi2", "qwen2moe", "smollm3", "starcoder2"),
            *("dots1", "ernie4_5-moe", "exaone-moe", "granitemoe", "hunyuan-moe", "jais2", "lfm2", "lfm2moe"),
            *("mistral3", "qwen2vl", "qwen3vl", "qwen3vlmoe"),
            *("deepseek2", "falcon-h1", "gpt2", "gptneox", "granitehybrid", "llama4", "mamba2"),
        )
    },
}
