"""A model of a real shape whose weights are drawn on the device: no file of gigabytes is written or read.

The checkpoint's folder holds what is read of it before weights are: config.json and the headers of its
tensors (over a file that is all hole). Everything else, memory plan and start-up included, is the engine's.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.device import Gpu
from engine.model import reading
from engine.model.weights import WeightReader

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": None,
}
# What changes of it in a rehearsal.
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
# Qwen3-30B-A3B: experts and nothing else between the layers' attentions.
QWEN3_30B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
# DeepSeek-V2-Lite: a latent cache, shared and routed experts behind one dense layer.
DEEPSEEK_LITE: dict[str, Any] = LLAMA_8B | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
}
TINY_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
TINY_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
# By the kind of a measurement; whatever is not here is Llama's shape.
SHAPES = {"moe": (QWEN3_30B, TINY | TINY_EXPERTS), "mla": (DEEPSEEK_LITE, TINY | TINY_EXPERTS | TINY_LATENT)}


def shape_of(gpu: Gpu, kind: str, num_layers: int = 0) -> dict[str, Any]:
    """The config.json of a kind of measurement, with `num_layers` layers where that is not 0."""
    real, tiny = SHAPES.get(kind, (LLAMA_8B, TINY))
    shape = real | (tiny if gpu.rehearses else {})
    wanted = 2 if gpu.compiles else num_layers
    return shape | ({"num_hidden_layers": min(wanted, shape["num_hidden_layers"])} if wanted else {})


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors."""
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            **_attention(f"{prefix}.self_attn", config),
            **_feed_forward(f"{prefix}.mlp", config, layer),
        }
    return shapes


def _attention(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, dim = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    if "kv_lora_rank" in config:
        rank, rope_dim = config["kv_lora_rank"], config["qk_rope_head_dim"]
        nope_dim, value_dim = config["qk_nope_head_dim"], config["v_head_dim"]
        return {
            f"{prefix}.q_proj.weight": (heads * (nope_dim + rope_dim), hidden),
            f"{prefix}.kv_a_proj_with_mqa.weight": (rank + rope_dim, hidden),
            f"{prefix}.kv_a_layernorm.weight": (rank,),
            f"{prefix}.kv_b_proj.weight": (heads * (nope_dim + value_dim), rank),
            f"{prefix}.o_proj.weight": (hidden, heads * value_dim),
        }
    keys = config["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.q_proj.weight": (heads * dim, hidden),
        f"{prefix}.k_proj.weight": (keys, hidden),
        f"{prefix}.v_proj.weight": (keys, hidden),
        f"{prefix}.o_proj.weight": (hidden, heads * dim),
    }
    if config["model_type"].startswith("qwen3"):
        shapes |= {f"{prefix}.q_norm.weight": (dim,), f"{prefix}.k_norm.weight": (dim,)}
    return shapes


def _feed_forward(prefix: str, config: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if "moe_intermediate_size" not in config or layer < config.get("first_k_dense_replace", 0):
        return _gated(prefix, hidden, inner)
    size = config["moe_intermediate_size"]
    num_experts = config.get("n_routed_experts") or config["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}.gate.weight": (num_experts, hidden)}
    for index in range(num_experts):
        shapes |= _gated(f"{prefix}.experts.{index}", hidden, size)
    if config.get("n_shared_experts"):
        shapes |= _gated(f"{prefix}.shared_experts", hidden, size * config["n_shared_experts"])
    return shapes


def _gated(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def weight_elements(config: dict[str, Any], num_tokens: int) -> tuple[int, int]:
    """Elements that a step of so many tokens reads: of the layers, and of the head. Of experts, as many as so
    many tokens choose when they choose evenly.
    """
    chosen = 1.0
    if "moe_intermediate_size" in config:
        count = config.get("n_routed_experts") or config["num_experts"]
        chosen = 1.0 - (1.0 - config["num_experts_per_tok"] / count) ** num_tokens
    layers = 0.0
    for name, shape in tensors_of(config).items():
        if name.startswith("model.layers") and len(shape) == 2:
            layers += math.prod(shape) * (chosen if ".experts." in name else 1.0)
    return int(layers), config["vocab_size"] * config["hidden_size"]


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """config.json, headers, and a tokenizer that nobody asks."""
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in tensors_of(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + end)
    vocabulary = {f"t{token}": token for token in range(config["vocab_size"])}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


class RandomReader(WeightReader):
    """Draws what it is asked for. Norms are one; the rest is scaled so that activations keep their size."""

    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        header = self._header(name, shape)
        self._count(name, header)
        if len(header.shape) == 1:
            return torch.ones(header.shape, dtype=torch.bfloat16, device=self.device)
        tensor = torch.empty(header.shape, dtype=torch.bfloat16, device=self.device)
        return tensor.normal_(std=header.shape[-1] ** -0.5)


@contextlib.contextmanager
def drawn_weights() -> Iterator[None]:
    """Models that are loaded inside get random weights."""
    plain = reading.WeightReader
    reading.WeightReader = RandomReader  # type: ignore[misc]
    try:
        yield
    finally:
        reading.WeightReader = plain  # type: ignore[misc]
