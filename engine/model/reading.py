"""Reads a model's records from a checkpoint. Layers ask for their tensors by name, and know their shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.kernels.attention import AttentionOptions
from engine.kernels.linear import DenseWeight, LinearBackend
from engine.kernels.linear.formats import WeightFormat, rows_of
from engine.kernels.linear.native import NativePacker
from engine.kernels.selection import Kernels, torch_kernels
from engine.model.calibration import Calibration
from engine.model.decoder import Decoder
from engine.model.experts import experts_together
from engine.model.records import (
    Attention,
    FeedForward,
    LatentAttention,
    Layer,
    Linear,
    ModelRecord,
    Norm,
    SparseFeedForward,
)
from engine.model.rope import rope_table
from engine.model.spec import ExpertSpec, ModelSpec
from engine.model.weights import WeightReader

# Placement to the names of norms (before attention, before feed-forward), (after attention, after
# feed-forward).
NORM_NAMES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "pre": (("input_layernorm", "post_attention_layernorm"), ("", "")),
    "post": (("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "sandwich": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}


class Packing(Protocol):
    """Makes of weights what multiplies while a model is loaded: no more than a layer is held twice."""

    # Whether float16 weights lose nothing by it; else they are rounded to the serving type.
    keeps_float16: bool

    def pack(self, linear: Linear) -> None:
        """Packs one linear layer."""


class TorchPacking:
    """Products of torch. Which one serves a shape is found out while loading, not in the first step."""

    keeps_float16 = False

    def __init__(self, backend: LinearBackend) -> None:
        self._backend = backend

    def pack(self, linear: Linear) -> None:
        linear.product = self._backend.pack(linear.weight)


class NativePacking:
    """Weights of the native kernels; those that were read are let go."""

    def __init__(self, packer: NativePacker) -> None:
        self._packer = packer
        self.keeps_float16 = packer.keeps_float16

    def pack(self, linear: Linear) -> None:
        linear.weight = self._packer.pack(linear.weight, linear.bias)
        linear.bias = linear.product = None


def read_model(
    weights: WeightReader, spec: ModelSpec, *, max_model_len: int, packing: Packing
) -> ModelRecord:
    """The whole model, layer by layer."""
    shape = (spec.vocab_size, spec.hidden_size)
    embedding = weights.keep("model.embed_tokens.weight", shape)
    calibration = Calibration(weights, spec, embedding, max_model_len) if weights.calibrates else None
    layers = []
    for index in range(spec.num_layers):
        layer = _layer(weights, index, spec)
        if calibration is not None:
            calibration.finish(layer)
        for linear in (*layer.linears(), *layer.routed_linears()):
            packing.pack(linear)
        layers.append(layer)
    norm = _norm(weights, "model.norm", spec.hidden_size, spec)
    if spec.tied_embeddings:
        weights.discard("lm_head.weight")
        head = weights.quantized_head(DenseWeight(values=embedding))
    else:
        head = weights.head("lm_head", shape)
    record = ModelRecord(
        spec=spec,
        max_model_len=max_model_len,
        embedding=embedding,
        embedding_type=str(embedding.dtype).removeprefix("torch."),
        embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=embedding.dtype)),
        layers=layers,
        norm=norm,
        head=Linear(weight=head),
        ropes=[
            (cos.to(weights.device), sin.to(weights.device))
            for cos, sin in (rope_table(rope, max_model_len) for rope in spec.ropes)
        ],
    )
    packing.pack(record.head)
    return record


def read_checkpoint(
    folder: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Callable[[str, float], None],
    config: EngineConfig | None = None,
    kernels: Kernels | None = None,
    packing: Packing | None = None,
) -> ModelRecord:
    """A checkpoint's model; `config` says whether its weights are quantized, `packing` who multiplies with
    them: torch, with `kernels`, unless it is given.

    Raises CheckpointError naming a tensor that is missing, misshapen or unexpected.
    """
    with WeightReader(
        folder,
        dtype=dtype,
        device=device,
        progress=progress,
        scheme=spec.quantization,
        config=config,
        kernels=kernels,
        is_packed=packing is not None,
        keeps_float16=packing is not None and packing.keeps_float16,
    ) as weights:
        record = read_model(
            weights,
            spec,
            max_model_len=max_model_len,
            packing=packing or TorchPacking(weights.kernels.linear),
        )
        weights.finish()
    return record


def load_decoder(folder: Path, spec: ModelSpec, *, kernels: Kernels | None = None, **options: Any) -> Decoder:
    """The same for torch; options as of `read_checkpoint`."""
    kernels = kernels or torch_kernels()
    return Decoder(read_checkpoint(folder, spec, kernels=kernels, **options), kernels)


def _layer(weights: WeightReader, index: int, spec: ModelSpec) -> Layer:
    prefix = f"model.layers.{index}"
    attention = _latent_attention if spec.latent else _attention
    before, after = NORM_NAMES[spec.norm_placement]

    def norm(name: str) -> Norm | None:
        return _norm(weights, f"{prefix}.{name}", spec.hidden_size, spec) if name else None

    is_sparse = spec.experts is not None and index in spec.experts.layers
    return Layer(
        attention=attention(weights, f"{prefix}.self_attn", spec, index),
        feed_forward=_sparse_feed_forward(weights, prefix, spec)
        if is_sparse
        else _feed_forward(weights, f"{prefix}.mlp", spec, spec.intermediate_size),
        before=[norm(name) for name in before],
        after=[norm(name) for name in after],
    )


def _linear(weights: WeightReader, names: list[str], outputs: list[int], inputs: int, bias: bool) -> Linear:
    linear = Linear(weight=weights.linear(names, outputs, inputs, calibrates=True))
    if bias:
        parts = zip(names, outputs, strict=True)
        linear.bias = torch.cat([weights.take(f"{name}.bias", (size,)) for name, size in parts])
    return linear


def _norm(weights: WeightReader, name: str, size: int, spec: ModelSpec) -> Norm:
    weight = _floats(weights, f"{name}.weight", size)
    return Norm(weight=weight + 1.0 if spec.norm_offset else weight, eps=spec.norm_eps)


def _floats(weights: WeightReader, name: str, size: int) -> Tensor:
    return weights.keep(name, (size,), dtype=torch.float32)


def _attention(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> Attention:
    sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    names, outputs = [f"{prefix}.{part}_proj" for part in "qkv"], sizes
    if spec.fused_projections:
        names, outputs = [f"{prefix}.qkv_proj"], [sum(sizes)]
    rope = spec.rope_of_layer[index]
    attention = Attention(
        qkv=_linear(weights, names, outputs, spec.hidden_size, spec.qkv_bias),
        output=_linear(weights, [f"{prefix}.o_proj"], [spec.hidden_size], sizes[0], spec.output_bias),
        sizes=sizes,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        options=AttentionOptions(
            scale=spec.attention_scale, window=spec.windows[index], soft_cap=spec.attention_soft_cap
        ),
        rope=rope,
        interleaved=spec.ropes[rope].interleaved,
        qk_norm=spec.qk_norm,
    )
    if spec.qk_norm != "none":
        whole = spec.qk_norm == "full"
        attention.q_norm = _norm(weights, f"{prefix}.q_norm", sizes[0] if whole else spec.head_dim, spec)
        attention.k_norm = _norm(weights, f"{prefix}.k_norm", sizes[1] if whole else spec.head_dim, spec)
    if spec.attention_sinks:
        attention.sinks = _floats(weights, f"{prefix}.sinks", spec.num_heads)
    return attention


def _latent_attention(weights: WeightReader, prefix: str, spec: ModelSpec, index: int) -> LatentAttention:
    latent, hidden, bias = spec.latent, spec.hidden_size, spec.qkv_bias
    assert latent is not None, "called for latent attention only"
    query_down = query_norm = None
    query_name, query_inputs = "q_proj", hidden
    if latent.query_rank:
        query_down = _linear(weights, [f"{prefix}.q_a_proj"], [latent.query_rank], hidden, bias)
        query_norm = _floats(weights, f"{prefix}.q_a_layernorm.weight", latent.query_rank)
        query_name, query_inputs = "q_b_proj", latent.query_rank
    query_size = spec.num_heads * (latent.nope_dim + latent.rope_dim)
    up_shape = (spec.num_heads * (latent.nope_dim + latent.value_dim), latent.kv_rank)
    # On a GPU the model's: in float32 matrix units are idle, and 576 numbers to a key have no registers.
    dtype = torch.float32 if weights.device.type == "cpu" else weights.dtype
    up = weights.dense(f"{prefix}.kv_b_proj", up_shape, dtype=dtype).view(spec.num_heads, -1, latent.kv_rank)
    rope = spec.rope_of_layer[index]
    down_name, down_size = f"{prefix}.kv_a_proj_with_mqa", latent.kv_rank + latent.rope_dim
    values = spec.num_heads * latent.value_dim
    return LatentAttention(
        query_down=query_down,
        query_norm=query_norm,
        query_up=_linear(weights, [f"{prefix}.{query_name}"], [query_size], query_inputs, False),
        down=_linear(weights, [down_name], [down_size], hidden, bias),
        latent_norm=_floats(weights, f"{prefix}.kv_a_layernorm.weight", latent.kv_rank),
        key_up=up[:, : latent.nope_dim].contiguous(),
        value_up=up[:, latent.nope_dim :].transpose(1, 2).contiguous(),
        output=_linear(weights, [f"{prefix}.o_proj"], [hidden], values, spec.output_bias),
        num_heads=spec.num_heads,
        latent=latent,
        options=AttentionOptions(scale=spec.attention_scale, window=spec.windows[index]),
        rope=rope,
        interleaved=spec.ropes[rope].interleaved,
    )


def _feed_forward(weights: WeightReader, prefix: str, spec: ModelSpec, size: int) -> FeedForward:
    names, sizes = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], [size, size]
    if spec.fused_projections:
        names, sizes = [f"{prefix}.gate_up_proj"], [2 * size]
    return FeedForward(
        gate_up=_linear(weights, names, sizes, spec.hidden_size, spec.mlp_bias),
        down=_linear(weights, [f"{prefix}.down_proj"], [spec.hidden_size], size, spec.mlp_bias),
        activation=spec.activation,
    )


def _sparse_feed_forward(weights: WeightReader, layer_prefix: str, spec: ModelSpec) -> SparseFeedForward:
    experts = spec.experts
    assert experts is not None, "called for sparse layers only"
    block, router = ROUTERS[experts.layout]
    prefix, count = f"{layer_prefix}.{block}", experts.num_experts
    weight = weights.take(f"{prefix}.{router}.weight", (count, spec.hidden_size), dtype=torch.float32)
    bias = correction = None
    if experts.layout == "gpt_oss":
        bias = weights.take(f"{prefix}.{router}.bias", (count,), dtype=torch.float32)
    if experts.correction_bias:
        correction = _floats(weights, f"{prefix}.{router}.e_score_correction_bias", count)
    found = LAYOUTS[experts.layout](weights, f"{prefix}.experts", spec, experts)
    together = experts_together(found, weights.kernels)
    shared = None
    if experts.shared_intermediate_size:
        name = f"{prefix}.shared_experts"
        shared = _feed_forward(weights, name, spec, experts.shared_intermediate_size)
    return SparseFeedForward(
        spec=experts,
        router=Linear(weight=DenseWeight(values=weight), bias=bias),
        correction=correction,
        # Together they have their own copy of the weights.
        experts=found if together is None else [],
        activation=spec.activation,
        shared=shared,
        together=together,
    )


def _expert(spec: ModelSpec, gate_up: WeightFormat, down: WeightFormat, *biases: Tensor) -> FeedForward:
    first, second = biases or (None, None)
    return FeedForward(
        gate_up=Linear(weight=gate_up, bias=first),
        down=Linear(weight=down, bias=second),
        activation=spec.activation,
    )


def _named_experts(*names: str) -> Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[FeedForward]]:
    """Experts whose gate, up and down are three tensors each, named so."""

    def read(weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec) -> list[FeedForward]:
        size, hidden = experts.intermediate_size, spec.hidden_size
        found = []
        for index in range(experts.num_experts):
            gate_name, up_name, down_name = (f"{prefix}.{index}.{name}" for name in names)
            gate_up = weights.linear([gate_name, up_name], [size, size], hidden)
            found.append(_expert(spec, gate_up, weights.linear([down_name], [hidden], size)))
        return found

    return read


def _gpt_oss_experts(
    weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec
) -> list[FeedForward]:
    """All experts in one tensor each, inputs first, gate and up taking turns; biases everywhere."""
    count, hidden, size = experts.num_experts, spec.hidden_size, experts.intermediate_size
    gate_up = weights.stacked(f"{prefix}.gate_up_proj", (count, 2 * size, hidden))
    gate_up_bias = weights.take(f"{prefix}.gate_up_proj_bias", (count, 2 * size))
    down = weights.stacked(f"{prefix}.down_proj", (count, hidden, size))
    down_bias = weights.take(f"{prefix}.down_proj_bias", (count, hidden))
    turns = torch.cat((torch.arange(0, 2 * size, 2), torch.arange(1, 2 * size, 2))).to(weights.device)
    return [
        _expert(
            spec,
            weights.quantized(rows_of(gate_up(index), turns)),
            weights.quantized(down(index)),
            gate_up_bias[index][turns],
            down_bias[index],
        )
        for index in range(count)
    ]


# Layout to the names of its block and of the router inside it.
ROUTERS = {"separate": ("mlp", "gate"), "mixtral": ("block_sparse_moe", "gate"), "gpt_oss": ("mlp", "router")}
LAYOUTS: dict[str, Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[FeedForward]]] = {
    "separate": _named_experts("gate_proj", "up_proj", "down_proj"),
    "mixtral": _named_experts("w1", "w3", "w2"),
    "gpt_oss": _gpt_oss_experts,
}
