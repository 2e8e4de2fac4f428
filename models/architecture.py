"""The networks: `Qwen3ForCausalLM` of `transformers` at two sizes, and how they are trained.

Shape letters: B rows, T tokens, V vocabulary, N chosen positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from models.tokenizer import CONTROL_TOKENS, VOCABULARY_SIZE

END_OF_TEXT_ID, IM_END_ID = CONTROL_TOKENS.index("<|endoftext|>"), CONTROL_TOKENS.index("<|im_end|>")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    max_positions: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6


NANO = Shape(hidden=256, layers=6, heads=4, kv_heads=2, head_size=64, intermediate=640)
"""About 4.7 million parameters, 9.3 MB in bfloat16."""
DRAFT = Shape(hidden=128, layers=3, heads=4, kv_heads=2, head_size=32, intermediate=384)
"""About 0.9 million parameters, 1.7 MB in bfloat16."""
SHAPES = {"nano": NANO, "draft": DRAFT}


def model_config(shape: Shape) -> dict[str, Any]:
    """`config.json` as `transformers` expects it for Qwen3."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }


class LanguageModel(Qwen3ForCausalLM):  # type: ignore[no-untyped-call]
    """A new network, whose head is tied to the embedding. Activations are bfloat16, parameters float32."""

    def __init__(self, shape: Shape) -> None:
        # Without an id for padding, whose embedding would not learn: it also ends every document.
        config = {**model_config(shape), "pad_token_id": None}
        super().__init__(Qwen3Config(**config))
        self.shape = shape
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                # What goes into the residual stream: each layer adds to it twice.
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * shape.layers))

    def compile_layers(self) -> None:
        """Fuse each layer's elementwise work; one compilation serves all layers of equal input shape."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def logits(self, ids: Tensor, selected: Tensor) -> Tensor:
        """Logits [N, V] in float32 at the N flat positions `selected` of ids [B, T]."""
        with torch.autocast("cpu", torch.bfloat16):
            embedded = self.model.embed_tokens(ids).to(torch.bfloat16)
            hidden = self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state
            logits: Tensor = self.lm_head(hidden.flatten(0, 1).index_select(0, selected))
        return logits.float()
