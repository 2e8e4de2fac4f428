"""The network, in plain torch, with the parameter names of `Qwen3ForCausalLM`, so that its state dict is
the checkpoint.

Shape letters: B rows, T tokens, E hidden size, H query heads, K kv heads, D head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.tokenizer import VOCABULARY_SIZE


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


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_size, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_size, shape.hidden, bias=False)
        self.q_norm = RMSNorm(shape.head_size, shape.norm_eps)
        self.k_norm = RMSNorm(shape.head_size, shape.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [B, T, E]; cos and sin [T, D]. Causal over each row."""
        num_rows, num_tokens, _ = x.shape
        size, group = self.shape.head_size, self.shape.heads // self.shape.kv_heads
        q = self.q_norm(self.q_proj(x).view(num_rows, num_tokens, -1, size)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(num_rows, num_tokens, -1, size)).transpose(1, 2)
        v = self.v_proj(x).view(num_rows, num_tokens, -1, size).transpose(1, 2)
        k, v = rotate(k, cos, sin).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(num_rows, num_tokens, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.norm_eps)


class LanguageModel(nn.Module):
    """Embedding, layers and a head tied to the embedding. Activations are bfloat16, parameters float32."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        cos, sin = rope_table(shape)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = math.sqrt(2 * self.shape.layers) if into_residual else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)

    def compile_layers(self) -> None:
        """Fuse each layer's elementwise work; one compilation serves all layers of equal input shape."""
        for layer in self.model.layers:
            layer.compile(dynamic=False)

    def forward(self, ids: Tensor, selected: Tensor) -> Tensor:
        """Logits [N, V] in float32 at the N flat positions `selected` of ids [B, T]."""
        num_tokens = ids.shape[1]
        with torch.autocast("cpu", torch.bfloat16):
            x = self.model.embed_tokens(ids).to(torch.bfloat16)
            for layer in self.model.layers:
                x = layer(x, self.cos[:num_tokens], self.sin[:num_tokens])  # type: ignore[index]
            x = self.model.norm(x.flatten(0, 1).index_select(0, selected))
            logits = F.linear(x, self.model.embed_tokens.weight)
        return logits.float()


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [max_positions, D] in bfloat16, halves repeated as in Llama."""
    frequency = shape.rope_theta ** (-torch.arange(0, shape.head_size, 2) / shape.head_size)
    angle = torch.outer(torch.arange(shape.max_positions).float(), frequency)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, H, T, D] turned by its positions' angles."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
