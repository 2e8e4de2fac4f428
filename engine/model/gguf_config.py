"""The metadata of a GGUF file as the keys of `config.json` that the families read. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.gguf_adjustments import ADJUSTMENTS
from engine.model.gguf_file import DENSE_TYPES, GgufFile, open_gguf
from engine.model.spec import CheckpointError
from engine.quantization.scheme import Scheme

ARCHITECTURES = {
    "apertus": "ApertusForCausalLM",
    "arcee": "ArceeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "command-r": "CohereForCausalLM",
    "deepseek2": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "exaone-moe": "ExaoneMoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon-h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gemma3n": "Gemma3nForCausalLM",
    "gemma4": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4moe": "Glm4MoeForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptneox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM",
    "jais2": "Jais2ForCausalLM",
    "jamba": "JambaForCausalLM",
    "kimi-linear": "KimiLinearForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "mamba": "MambaForCausalLM",
    "mamba2": "Mamba2ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM",
    "mistral3": "Ministral3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron_h_moe": "NemotronHForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi2": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhimoeForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen2vl": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM",
    "qwen35moe": "Qwen3_5MoeForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "qwen3next": "Qwen3NextForCausalLM",
    "qwen3vl": "Qwen3ForCausalLM",
    "qwen3vlmoe": "Qwen3MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
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
    if arch in ADJUSTMENTS:
        try:
            ADJUSTMENTS[arch](file, values)
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
