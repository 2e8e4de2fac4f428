"""What architectures of GGUF files say in metadata of their own, as the keys of `config.json`. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.model.gguf_file import GgufFile

Values = dict[str, Any]
_MAVERICKS_EXPERTS = 128
# Layers of the one size whose scores are scaled by the width of a head's share of the hidden size (27B).
_SCALED_BY_SHARE = {"gemma2": 46, "gemma3": 62}


def rotated_share(file: GgufFile, values: Values) -> None:
    """The part of each head that is rotated."""
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    values["partial_rotary_factor"] = file.number("rope.dimension_count", head_dim) / head_dim


def windows(file: GgufFile, values: Values) -> None:
    """Which layers slide."""
    pattern = file.metadata.get(f"{file.architecture}.attention.sliding_window_pattern")
    if pattern is not None:
        values["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]


def layer_kinds(file: GgufFile, values: Values, other: str) -> None:
    """Which layers attend, by the tensors that they have; of those, how many heads have keys."""
    attends = [
        f"model.layers.{layer}.self_attn.q_proj.weight" in file.headers for layer in range(file.num_layers)
    ]
    values["layer_types"] = ["full_attention" if each else other for each in attends]
    counts = values.get("num_key_value_heads")
    if isinstance(counts, list):
        own = {count for count, each in zip(counts, attends, strict=False) if each}
        if len(own) > 1:
            raise ValueError(f"attention.head_count_kv = {counts} differs between layers that attend")
        values["num_key_value_heads"] = next(iter(own), values["num_attention_heads"])


def first_sparse(file: GgufFile) -> int:
    """The first layer that has experts: what metadata say of it was not true of every checkpoint."""
    routers = (f"model.layers.{layer}.mlp.gate.weight" in file.headers for layer in range(file.num_layers))
    return next((layer for layer, each in enumerate(routers) if each), file.num_layers)


def _corrected(file: GgufFile, values: Values) -> None:
    """Experts as DeepSeek-V3 has them."""
    values["first_k_dense_replace"] = first_sparse(file)
    values["n_shared_experts"] = values["num_shared_experts"] = file.number("expert_shared_count", 0)
    values["n_routed_experts"] = values["num_experts"]
    values["n_group"] = file.number("expert_group_count", 1)
    values["topk_group"] = file.number("expert_group_used_count", 1)
    arch, metadata = file.architecture, file.metadata
    values["routed_scaling_factor"] = metadata.get(f"{arch}.expert_weights_scale", 1.0)
    values["norm_topk_prob"] = metadata.get(f"{arch}.expert_weights_norm", False)
    if file.number("expert_gating_func", 2) != 2:
        raise ValueError("expert_gating_func is not 2 (sigmoid), which is not supported")


def _glm4_moe(file: GgufFile, values: Values) -> None:
    _corrected(file, values)
    rotated_share(file, values)


def _exaone_moe(file: GgufFile, values: Values) -> None:
    _corrected(file, values)
    windows(file, values)


def _gpt_oss(file: GgufFile, values: Values) -> None:
    """The rotation is stretched without rounding where its frequencies part."""
    values["experts_layout"] = "biased"
    values["intermediate_size"] = values["moe_intermediate_size"]
    if "rope_scaling" in values:
        values["rope_scaling"]["truncate"] = False


def _granite_moe(file: GgufFile, values: Values) -> None:
    values["experts_layout"] = "separate"
    values["shared_intermediate_size"] = file.number("expert_shared_feed_forward_length", 0)


def _hunyuan_moe(file: GgufFile, values: Values) -> None:
    values["moe_topk"] = values["num_experts_per_tok"]
    values["num_shared_expert"] = file.number("expert_shared_count", 1)


def _ernie_moe(file: GgufFile, values: Values) -> None:
    values["moe_num_experts"], values["moe_k"] = values["num_experts"], values["num_experts_per_tok"]
    values["moe_layer_interval"] = file.number("interleave_moe_layer_step", 1)
    values["moe_layer_start_index"] = file.number("leading_dense_block_count", 0)
    shared = "model.layers.{}.mlp.shared_experts.up_proj.weight"
    names = [name for layer in range(file.num_layers) if (name := shared.format(layer)) in file.headers]
    width = file.headers[names[0]].shape[0] if names else 0
    values["moe_num_shared_experts"] = width // values["moe_intermediate_size"]


def _minimax(file: GgufFile, values: Values) -> None:
    values["use_qk_norm"] = True
    values["intermediate_size"] = values.get("moe_intermediate_size", values["intermediate_size"])
    rotated_share(file, values)


def _mistral3(file: GgufFile, values: Values) -> None:
    prefix, scaling = file.architecture, values.get("rope_scaling", {})
    metadata = file.metadata
    beta = metadata.get(f"{prefix}.attention.temperature_scale")
    if not scaling:
        # Mistral Small 3 with eyes.
        values["architectures"] = ["MistralForCausalLM"]
        return
    if beta is not None:
        scaling["llama_4_scaling_beta"] = beta
    magnitude = metadata.get(f"{prefix}.rope.scaling.yarn_log_multiplier")
    if magnitude is not None:
        scaling["mscale"] = scaling["mscale_all_dim"] = magnitude


def _llama4(file: GgufFile, values: Values) -> None:
    """Chunks, and how queries grow, are nowhere stated: they are those of all that were published."""
    values["experts_layout"] = "separate"
    values["intermediate_size_mlp"] = values["intermediate_size"]
    values["intermediate_size"] = values["moe_intermediate_size"]
    routers = (f"model.layers.{layer}.mlp.gate.weight" in file.headers for layer in range(file.num_layers))
    values["moe_layers"] = [layer for layer, each in enumerate(routers) if each]
    # Maverick has no norms of queries and keys.
    values["use_qk_norm"] = values.get("num_local_experts") != _MAVERICKS_EXPERTS
    values["attention_chunk_size"] = 8192
    if values.pop("sliding_window", None) == 0:
        values["attention_chunk_size"], values["no_rope_layers"] = None, [1] * file.num_layers


def _phimoe(file: GgufFile, values: Values) -> None:
    values["sliding_window"] = values.get("sliding_window") or None
    values["lm_head_bias"] = "lm_head.bias" in file.headers


def _mistral4(file: GgufFile, values: Values) -> None:
    """Experts by softmax; the growth of queries where it is stated, which not every converter did."""
    _latents(file, values)
    scaling = values.setdefault("rope_scaling", {"rope_type": "default"})
    arch, metadata = file.architecture, file.metadata
    beta = metadata.get(f"{arch}.attention.temperature_scale")
    if beta:
        scaling["llama_4_scaling_beta"] = beta
        length = file.number("attention.temperature_length", 0)
        if length not in (0, scaling.get("original_max_position_embeddings")):
            raise ValueError(f"attention.temperature_length = {length} is not the rotation's original length")
    values["experts_layout"] = "separate"
    first = values["first_k_dense_replace"] = first_sparse(file)
    if f"model.layers.{first}.mlp.experts.0.gate_up_proj.weight" in file.headers:
        values["experts_layout"] = "fused"
    if file.number("expert_gating_func", 1) != 1:
        raise ValueError("expert_gating_func is not 1 (softmax), which is not supported")
    values["n_shared_experts"] = file.number("expert_shared_count", 0)
    values["n_routed_experts"] = values["num_experts"]
    values["routed_scaling_factor"] = metadata.get(f"{arch}.expert_weights_scale", 1.0)
    values["norm_topk_prob"] = metadata.get(f"{arch}.expert_weights_norm", False)
    values["n_group"] = file.number("expert_group_count", 1)
    values["topk_group"] = file.number("expert_group_used_count", 1)


def _stablelm(file: GgufFile, values: Values) -> None:
    rotated_share(file, values)
    values["use_qkv_bias"] = values["attention_bias"]
    values["qk_layernorm"] = "model.layers.0.self_attn.q_norm.norms.0.weight" in file.headers
    values["use_parallel_residual"] = "model.layers.0.post_attention_layernorm.weight" not in file.headers


def _jais2(file: GgufFile, values: Values) -> None:
    values["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in file.headers


def _lfm2(file: GgufFile, values: Values) -> None:
    layer_kinds(file, values, "conv")
    values["conv_L_cache"] = file.number("shortconv.l_cache")
    values["conv_bias"] = any(name.endswith(".state.conv1d.bias") for name in file.headers)
    values["norm_eps"] = values["rms_norm_eps"]
    # What is stated is what the tensors have.
    values["block_auto_adjust_ff_dim"] = False
    if file.architecture == "lfm2moe":
        values["num_dense_layers"] = file.number("leading_dense_block_count", 0)
        values["use_expert_bias"] = any(name.endswith(".e_score_correction_bias") for name in file.headers)


def _delta(file: GgufFile, values: Values) -> None:
    """Qwen3-Next and Qwen3.5."""
    layer_kinds(file, values, "linear_attention")
    rotated_share(file, values)
    heads = file.number("ssm.time_step_rank")
    values["linear_conv_kernel_dim"] = file.number("ssm.conv_kernel")
    values["linear_num_key_heads"] = file.number("ssm.group_count")
    values["linear_num_value_heads"] = heads
    values["linear_key_head_dim"] = file.number("ssm.state_size")
    values["linear_value_head_dim"] = file.number("ssm.inner_size") // heads
    values["norm_topk_prob"] = True
    if file.architecture == "qwen3next":
        values["linear_layout"] = "separate"
        values["mlp_only_layers"] = [
            layer
            for layer in range(file.num_layers)
            if f"model.layers.{layer}.mlp.gate.weight" not in file.headers
        ]


def _state_biases(file: GgufFile, values: Values) -> None:
    for key, end in (("mamba_conv_bias", "conv1d.bias"), ("mamba_proj_bias", "in_proj.bias")):
        values[key] = any(name.endswith(f".state.{end}") for name in file.headers)


def _mamba2(file: GgufFile, values: Values) -> None:
    """Sizes of Mamba 2 under the names that Bamba and those after it have."""
    size, hidden = file.number("ssm.inner_size"), values["hidden_size"]
    heads = values["mamba_n_heads"] = file.number("ssm.time_step_rank")
    values["mamba_n_groups"] = file.number("ssm.group_count")
    values["mamba_d_state"] = file.number("ssm.state_size")
    values["mamba_d_conv"] = file.number("ssm.conv_kernel")
    values["mamba_d_head"], values["mamba_d_ssm"] = size // heads, size
    values["mamba_expand"] = size // hidden
    _state_biases(file, values)


def _jamba(file: GgufFile, values: Values) -> None:
    layer_kinds(file, values, "mamba")
    routers = [f"model.layers.{layer}.mlp.gate.weight" in file.headers for layer in range(file.num_layers)]
    values["mlp_layer_types"] = ["sparse" if has else "dense" for has in routers]
    values["mamba_d_state"] = file.number("ssm.state_size")
    values["mamba_d_conv"] = file.number("ssm.conv_kernel")
    values["mamba_dt_rank"] = file.number("ssm.time_step_rank")
    values["mamba_expand"] = file.number("ssm.inner_size") // values["hidden_size"]
    _state_biases(file, values)


def _mamba(file: GgufFile, values: Values) -> None:
    """Of heads and feed-forwards zeros are stated, and of a context a number that says nothing."""
    del values["max_position_embeddings"]
    size, steps = file.number("ssm.inner_size"), file.number("ssm.time_step_rank")
    values["intermediate_size"], values["expand"] = size, size / values["hidden_size"]
    values["state_size"], values["conv_kernel"] = (
        file.number("ssm.state_size"),
        file.number("ssm.conv_kernel"),
    )
    values["layer_norm_epsilon"] = values["rms_norm_eps"]
    for key, name in (("use_bias", "in_proj"), ("use_conv_bias", "conv1d")):
        values[key] = f"model.layers.0.state.{name}.bias" in file.headers
    if file.architecture == "mamba2":
        values["num_heads"], values["head_dim"] = steps, size // steps
        values["n_groups"] = file.number("ssm.group_count")
        return
    values["time_step_rank"] = steps
    if file.metadata.get("mamba.ssm.dt_b_c_rms", False):
        values["architectures"] = ["FalconMambaForCausalLM"]


def _granite_hybrid(file: GgufFile, values: Values) -> None:
    if file.number("ssm.inner_size") % values["hidden_size"]:
        raise ValueError("ssm.inner_size is no multiple of embedding_length, which is not supported")
    layer_kinds(file, values, "mamba")
    _mamba2(file, values)
    turns = file.metadata.get("granitehybrid.rope.scaling.finetuned", False)
    values["position_embedding_type"] = "rope" if turns else "nope"
    _granite_moe(file, values)
    if not values.get("num_local_experts"):
        values["num_local_experts"], values["shared_intermediate_size"] = 0, values["intermediate_size"]


def _falcon_h1(file: GgufFile, values: Values) -> None:
    """Weights are multiplied already. Norms of states, where they are, come behind the gate there."""
    _mamba2(file, values)
    values["mamba_rms_norm"] = "model.layers.0.state.norm.weight" in file.headers
    values["mamba_norm_before_gate"] = False
    if values["tie_word_embeddings"]:
        raise ValueError("output.weight is missing: the embedding is multiplied, and is not the head")


def _gpt2(file: GgufFile, values: Values) -> None:
    values["layer_norm_epsilon"] = values["layer_norm_eps"]
    # What is stated is four times the hidden size, whatever the tensors have.
    values["intermediate_size"] = file.header("model.layers.0.mlp.up_proj.weight").shape[0]


def _gpt_neox(file: GgufFile, values: Values) -> None:
    """Queries of all heads come first there, and then keys."""
    values["qkv_layout"] = "whole"
    rotated_share(file, values)
    values["use_parallel_residual"] = file.metadata.get("gptneox.use_parallel_residual", True)
    values["attention_bias"] = "model.layers.0.self_attn.qkv_proj.bias" in file.headers
    # The converter does not say which GELU it is; all published ones have the exact one.
    values["hidden_act"] = "gelu"


def _nemotron_h(file: GgufFile, values: Values) -> None:
    arch, metadata, headers = file.architecture, file.metadata, file.headers
    letters = (("M", "state.in_proj"), ("*", "self_attn.q_proj"), ("E", "mlp.gate"), ("-", "mlp.up_proj"))
    pattern = ""
    for layer in range(file.num_layers):
        found = (letter for letter, name in letters if f"model.layers.{layer}.{name}.weight" in headers)
        pattern += next(found, "?")
    values["hybrid_override_pattern"] = pattern
    counts = values["num_key_value_heads"]
    if isinstance(counts, list):
        if len(set(counts) - {0}) > 1:
            raise ValueError(f"attention.head_count_kv = {counts} differs between layers that attend")
        values["num_key_value_heads"] = max(counts)
    # What is stated is that of experts, where there are some.
    dense = [f"model.layers.{layer}.mlp.up_proj.weight" for layer, each in enumerate(pattern) if each == "-"]
    values["intermediate_size"] = file.header(dense[0]).shape[0] if dense else values["hidden_size"]
    values["layer_norm_epsilon"] = values.get("rms_norm_eps", values.get("layer_norm_eps"))
    heads = values["mamba_num_heads"] = file.number("ssm.time_step_rank")
    values["mamba_head_dim"] = file.number("ssm.inner_size") // heads
    values["n_groups"], values["ssm_state_size"] = (
        file.number("ssm.group_count"),
        file.number("ssm.state_size"),
    )
    values["conv_kernel"] = file.number("ssm.conv_kernel")
    ends = {"use_conv_bias": "conv1d", "use_bias": "state.in_proj", "mlp_bias": "up_proj"}
    ends["attention_bias"] = "self_attn.q_proj"
    for key, end in ends.items():
        values[key] = any(name.endswith(f".{end}.bias") for name in headers)
    if "E" in pattern:
        values["n_routed_experts"] = values["num_experts"]
        values["moe_shared_expert_intermediate_size"] = file.number("expert_shared_feed_forward_length")
        values["norm_topk_prob"] = metadata.get(f"{arch}.expert_weights_norm", False)
        values["routed_scaling_factor"] = metadata.get(f"{arch}.expert_weights_scale", 1.0)
        values["n_group"] = file.number("expert_group_count", 1)
        values["moe_latent_size"] = file.number("moe_latent_size", 0) or None


def _deepseek2(file: GgufFile, values: Values) -> None:
    """DeepSeek-V2 has no corrections of its choice."""
    _latents(file, values)
    if values.get("num_experts") is None:
        raise ValueError("expert_count is missing: latent attention without experts is not supported")
    if any(name.endswith(".e_score_correction_bias") for name in file.headers):
        _corrected(file, values)
    else:
        _uncorrected(file, values)


def _latents(file: GgufFile, values: Values) -> None:
    """Latent attention's sizes, and what its rotation is stretched by."""
    arch, metadata = file.architecture, file.metadata
    for end, name in (("key", "qk_nope_head_dim"), ("value", "v_head_dim")):
        values[name] = file.number(f"attention.{end}_length_mla", file.number(f"attention.{end}_length"))
    values["qk_rope_head_dim"] = file.number("rope.dimension_count")
    values["qk_nope_head_dim"] -= values["qk_rope_head_dim"]
    values["q_lora_rank"] = file.number("attention.q_lora_rank", 0) or None
    values["kv_lora_rank"] = file.number("attention.kv_lora_rank")
    values["num_key_value_heads"] = values["num_attention_heads"]
    values.pop("head_dim", None)
    scaling = values.get("rope_scaling", {})
    magnitude = metadata.get(f"{arch}.rope.scaling.yarn_log_multiplier")
    if magnitude is not None and scaling:
        # A tenth of it is stated there.
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * magnitude


def _kimi_linear(file: GgufFile, values: Values) -> None:
    """Layers that attend have latents. How many heads the others have is nowhere stated."""
    layers = range(file.num_layers)
    attends = [
        f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" in file.headers for layer in layers
    ]
    values["layer_types"] = ["full_attention" if each else "linear_attention" for each in attends]
    _deepseek2(file, values)
    head_dim = values["linear_head_dim"] = file.number("kda.head_dim")
    values["linear_conv_kernel_dim"] = file.number("ssm.conv_kernel")
    if False in attends:
        (channels,) = file.header(f"model.layers.{attends.index(False)}.state.dt_bias").shape
        values["linear_num_heads"] = channels // head_dim


def _uncorrected(file: GgufFile, values: Values) -> None:
    """As DeepSeek-V2 chooses experts."""
    if file.number("expert_gating_func", 1) != 1:
        raise ValueError("expert_gating_func is not 1 (softmax) without corrections, which is not supported")
    if file.metadata.get("deepseek2.expert_weights_norm", False):
        raise ValueError("expert_weights_norm is true without corrections, which is not supported")
    values["architectures"] = ["DeepseekV2ForCausalLM"]
    values["first_k_dense_replace"] = first_sparse(file)
    values["n_shared_experts"] = file.number("expert_shared_count", 0)
    values["n_routed_experts"] = values["num_experts"]
    values["routed_scaling_factor"] = file.metadata.get("deepseek2.expert_weights_scale", 1.0)
    groups = file.number("expert_group_count", 1)
    if groups > 1:
        values["topk_method"], values["n_group"] = "group_limited_greedy", groups
        values["topk_group"] = file.number("expert_group_used_count")


def _normalized(file: GgufFile, values: Values) -> None:
    values["norm_topk_prob"] = True


def _llama(file: GgufFile, values: Values) -> None:
    if values.get("num_local_experts"):
        values["architectures"] = ["MixtralForCausalLM"]


def _gemma(file: GgufFile, values: Values) -> None:
    share = values["hidden_size"] // values["num_attention_heads"]
    by_share = values["num_hidden_layers"] == _SCALED_BY_SHARE[file.architecture]
    values["query_pre_attn_scalar"] = share if by_share else values["head_dim"]
    if file.architecture == "gemma3":
        values.setdefault("rope_theta", 1_000_000.0)


def _olmo2(file: GgufFile, values: Values) -> None:
    if values.get("sliding_window"):
        values["architectures"] = ["Olmo3ForCausalLM"]
        windows(file, values)


def _partial(file: GgufFile, values: Values) -> None:
    rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if rotated is not None and rotated != head_dim:
        values["partial_rotary_factor"] = rotated / head_dim


def _gemma4(file: GgufFile, values: Values) -> None:
    """Heads of layers that slide are described beside those of the others, which come first there."""
    windows(file, values)
    metadata, slides = file.metadata, [name == "sliding_attention" for name in values["layer_types"]]
    values["global_head_dim"] = values["head_dim"]
    values["head_dim"] = metadata.get("gemma4.attention.key_length_swa", values["head_dim"])
    counts = values["num_key_value_heads"]
    if isinstance(counts, list):
        by_kind = dict(zip(slides, counts, strict=True))
        values["num_key_value_heads"] = by_kind.get(True, by_kind[False])
        values["num_global_key_value_heads"] = by_kind[False]
    sizes = values["intermediate_size"]
    if isinstance(sizes, list):
        values["intermediate_size"], values["use_double_wide_mlp"] = sizes[0], sizes[-1] == 2 * sizes[0]
    _per_layer(file, values)
    values["attention_k_eq_v"] = any(
        f"model.layers.{layer}.self_attn.k_proj.weight" in file.headers
        and f"model.layers.{layer}.self_attn.v_proj.weight" not in file.headers
        for layer, slide in enumerate(slides)
        if not slide
    )
    values["enable_moe_block"] = bool(values.get("num_experts"))
    values["top_k_experts"] = values.get("num_experts_per_tok")
    values["experts_layout"] = "fused"
    full = {"rope_type": "default", "rope_theta": values.pop("rope_theta", 1_000_000.0)}
    if "rope_freqs.weight" in file.stored:
        # Pairs that stand still are slowed down beyond all bounds there.
        turning = int((file.stored["rope_freqs.weight"].data < 1e20).sum())
        share = 2 * (turning + 0.25) / values["global_head_dim"]
        full |= {"rope_type": "proportional", "partial_rotary_factor": share}
    own = {"rope_type": "default", "rope_theta": values.pop("rope_local_base_freq", 10_000.0)}
    values["rope_parameters"] = {"full_attention": full, "sliding_attention": own}


def _gemma3n(file: GgufFile, values: Values) -> None:
    windows(file, values)
    _per_layer(file, values)
    metadata = file.metadata
    values["altup_active_idx"] = metadata["gemma3n.altup.active_idx"]
    values["altup_num_inputs"] = metadata["gemma3n.altup.num_inputs"]
    values["activation_sparsity_scale"] = metadata["gemma3n.activation_sparsity_scale"]
    values["laurel_rank"] = file.header("model.layers.0.laurel.linear_left.weight").shape[0]
    values.setdefault("rope_theta", 1_000_000.0)


def _per_layer(file: GgufFile, values: Values) -> None:
    prefix, table = file.architecture, file.headers.get("model.embed_tokens_per_layer.weight")
    values["num_kv_shared_layers"] = file.metadata.get(f"{prefix}.attention.shared_kv_layers", 0)
    width = file.metadata.get(f"{prefix}.embedding_length_per_layer_input", 0)
    values["hidden_size_per_layer_input"] = width
    if table is not None:
        values["vocab_size_per_layer_input"] = table.shape[0]


ADJUSTMENTS: dict[str, Callable[[GgufFile, Values], None]] = {
    "deepseek2": _deepseek2,
    "dots1": _corrected,
    "ernie4_5-moe": _ernie_moe,
    "exaone-moe": _exaone_moe,
    "exaone4": windows,
    "falcon-h1": _falcon_h1,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "glm4moe": _glm4_moe,
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "gptneox": _gpt_neox,
    "granitehybrid": _granite_hybrid,
    "granitemoe": _granite_moe,
    "hunyuan-moe": _hunyuan_moe,
    "jais2": _jais2,
    "jamba": _jamba,
    "kimi-linear": _kimi_linear,
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": _minimax,
    "mistral3": _mistral3,
    "mistral4": _mistral4,
    "olmo2": _olmo2,
    "phimoe": _phimoe,
    "stablelm": _stablelm,
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _normalized),
    **dict.fromkeys(("glm4", "nemotron", "phi2", "phi3"), _partial),
    **dict.fromkeys(("mamba", "mamba2"), _mamba),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _delta),
}
"""By architecture; the others say nothing of their own."""
