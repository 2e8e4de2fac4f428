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


def tensors_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Llama."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
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
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


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
