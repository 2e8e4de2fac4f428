"""The metadata of a GGUF file as the keys of `config.json` that the families read. No torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.gguf_adjustments import LATER_ADJUSTMENTS, LATER_ARCHITECTURES, windows
from engine.model.gguf_file import DENSE_TYPES, GgufFile, open_gguf
from engine.model.spec import CheckpointError
from engine.quantization.scheme import Scheme

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "arcee": "ArceeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "granite": "GraniteForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi2": "PhiForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    **LATER_ARCHITECTURES,
}
# Architectures that the metadata of another one makes of it.
_ALSO = {
    "FalconMambaForCausalLM": ("mamba",),
    "MistralForCausalLM": ("llama",),
    "MixtralForCausalLM": ("llama",),
    "Olmo3ForCausalLM": ("olmo2",),
}
# Key of config.json to key of the metadata, after the architecture's name; those that are there are taken.
KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "max_position_embeddings": "context_length",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), "attention.layer_norm_epsilon"),
    **dict.fromkeys(("logit_scale", "logits_scaling"), "logit_scale"),
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
}
# Those that say whether the first layer has a tensor.
_BY_TENSOR = {
    **dict.fromkeys(("attention_bias", "use_bias"), "self_attn.q_proj.bias"),
    "attention_out_bias": "self_attn.o_proj.bias",
    "mlp_bias": "mlp.up_proj.bias",
    "use_qk_norm": "self_attn.q_norm.weight",
}
_FIRST = "model.layers.0.self_attn.o_proj.weight"
# Those that every architecture has.
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
# Those whose layers have sizes and rotations of their own, which are read by the architecture.
_MAY_DIFFER = frozenset({"gemma3n", "gemma4"})
# Those whose layers may have no keys, since they do not attend.
_MIXED = frozenset(
    {"granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe"}
)
# Layers of the one size whose scores are scaled by the width of a head's share of the hidden size (27B).
_SCALED_BY_SHARE = {"gemma2": 46, "gemma3": 62}


def gguf_reader(path: Path) -> ConfigReader:
    """`config.json` of a GGUF file. Raises CheckpointError."""
    file = open_gguf(path)
    arch, metadata = file.architecture, file.metadata
    values: dict[str, Any] = {
        key: metadata[f"{arch}.{name}"] for key, name in KEYS.items() if f"{arch}.{name}" in metadata
    }
    for key in _NEEDED:
        if key not in values:
            raise CheckpointError(f"{path}: {arch}.{KEYS[key]} is missing")
    for key in ("head_dim", "num_key_value_heads", "intermediate_size"):
        if isinstance(values.get(key), list) and arch not in _MAY_DIFFER | _MIXED:
            raise CheckpointError(
                f"{path}: {arch}.{KEYS[key]} differs between layers, which is not supported"
            )
    values["num_hidden_layers"] = file.num_layers
    values["architectures"] = [ARCHITECTURES[arch]]
    values["vocab_size"] = file.header("model.embed_tokens.weight").shape[0]
    values["tie_word_embeddings"] = "lm_head.weight" not in file.headers
    values["torch_dtype"] = {"F32": "float32", "F16": "float16"}.get(_main_type(file), "bfloat16")
    for key, name in _BY_TENSOR.items():
        values[key] = f"model.layers.0.{name}" in file.headers
    if arch not in _MAY_DIFFER and (scaling := _rope_scaling(file)):
        values["rope_scaling"] = scaling
    if arch in _ADJUSTMENTS:
        try:
            _ADJUSTMENTS[arch](file, values)
        except (KeyError, ValueError, ZeroDivisionError) as error:
            raise CheckpointError(f"{path}: {arch}'s metadata cannot be read: {error!r}") from error
    return ConfigReader(values, str(path), is_whole=True)


def gguf_names(architecture: str) -> tuple[str, ...]:
    """What llama.cpp calls an architecture; empty where its files are not read."""
    found = tuple(name for name, ours in ARCHITECTURES.items() if ours == architecture)
    return found or _ALSO.get(architecture, ())


def gguf_scheme(path: Path) -> Scheme | None:
    """None when every tensor is dense."""
    headers = open_gguf(path).headers.values()
    return Scheme(method="gguf") if any(header.dtype not in DENSE_TYPES for header in headers) else None


def _main_type(file: GgufFile) -> str:
    """Of the first layer that attends; or of the first one, where none does."""
    names = [f"model.layers.{layer}.self_attn.o_proj.weight" for layer in range(file.num_layers)]
    names.append("model.layers.0.state.out_proj.weight")
    return file.header(next((name for name in names if name in file.headers), _FIRST)).dtype


def _rope_scaling(file: GgufFile) -> dict[str, Any]:
    arch, metadata = file.architecture, file.metadata
    if "rope_freqs.weight" in file.stored:
        # Llama 3.1's rule, evaluated: each frequency is divided by its factor.
        divisors = file.stored["rope_freqs.weight"].data.astype(float).tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
        }
    prefix = f"{arch}.rope.scaling."
    original = metadata.get(f"{prefix}original_context_length")
    factors = {f"{length}_factor": f"rope_factors_{length}.weight" for length in ("long", "short")}
    missing = [name for name in factors.values() if name not in file.stored]
    if len(missing) == 1:
        raise CheckpointError(f"{file.path}: tensor {missing[0]} is missing; convert the checkpoint again")
    if not missing:
        scaling = {
            "rope_type": "longrope",
            **{key: file.stored[name].data.astype(float).tolist() for key, name in factors.items()},
            "original_max_position_embeddings": original,
            "attention_factor": metadata.get(f"{prefix}attn_factor"),
        }
        return {key: value for key, value in scaling.items() if value is not None}
    kind = metadata.get(f"{prefix}type", "none")
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": metadata.get(f"{prefix}factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            scaling[name] = metadata.get(f"{prefix}yarn_{name}")
    elif kind != "linear":
        raise CheckpointError(
            f"{file.path}: {prefix}type = {kind!r} is not supported, only none, linear, yarn"
        )
    return {key: value for key, value in scaling.items() if value is not None}


def _llama(file: GgufFile, values: dict[str, Any]) -> None:
    if values.get("num_local_experts"):
        values["architectures"] = ["MixtralForCausalLM"]


def _qwen3_moe(file: GgufFile, values: dict[str, Any]) -> None:
    values["norm_topk_prob"] = True


def _gemma(file: GgufFile, values: dict[str, Any]) -> None:
    share = values["hidden_size"] // values["num_attention_heads"]
    by_share = values["num_hidden_layers"] == _SCALED_BY_SHARE[file.architecture]
    values["query_pre_attn_scalar"] = share if by_share else values["head_dim"]
    if file.architecture == "gemma3":
        values.setdefault("rope_theta", 1_000_000.0)


def _olmo2(file: GgufFile, values: dict[str, Any]) -> None:
    if values.get("sliding_window"):
        values["architectures"] = ["Olmo3ForCausalLM"]
        windows(file, values)


def _partial(file: GgufFile, values: dict[str, Any]) -> None:
    rotated = file.metadata.get(f"{file.architecture}.rope.dimension_count")
    head_dim = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    if rotated is not None and rotated != head_dim:
        values["partial_rotary_factor"] = rotated / head_dim


def _gemma4(file: GgufFile, values: dict[str, Any]) -> None:
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


def _gemma3n(file: GgufFile, values: dict[str, Any]) -> None:
    windows(file, values)
    _per_layer(file, values)
    metadata = file.metadata
    values["altup_active_idx"] = metadata["gemma3n.altup.active_idx"]
    values["altup_num_inputs"] = metadata["gemma3n.altup.num_inputs"]
    values["activation_sparsity_scale"] = metadata["gemma3n.activation_sparsity_scale"]
    values["laurel_rank"] = file.header("model.layers.0.laurel.linear_left.weight").shape[0]
    values.setdefault("rope_theta", 1_000_000.0)


def _per_layer(file: GgufFile, values: dict[str, Any]) -> None:
    prefix, table = file.architecture, file.headers.get("model.embed_tokens_per_layer.weight")
    values["num_kv_shared_layers"] = file.metadata.get(f"{prefix}.attention.shared_kv_layers", 0)
    width = file.metadata.get(f"{prefix}.embedding_length_per_layer_input", 0)
    values["hidden_size_per_layer_input"] = width
    if table is not None:
        values["vocab_size_per_layer_input"] = table.shape[0]


_ADJUSTMENTS: dict[str, Callable[[GgufFile, dict[str, Any]], None]] = {
    "llama": _llama,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "exaone4": windows,
    "olmo2": _olmo2,
    **dict.fromkeys(("glm4", "nemotron", "phi2", "phi3"), _partial),
    **LATER_ADJUSTMENTS,
}
