"""Reads sparse feed-forward layers: their router and experts, as checkpoints lay them out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.model.experts import experts_together
from engine.model.layers import read_feed_forward, read_linear
from engine.model.records import FeedForward, Linear, SparseFeedForward
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec
from engine.model.weights import WeightReader, unblocked
from kernels.linear.formats import DenseWeight, PartedWeight, WeightFormat, parts_of, rows_of

Weight = WeightFormat | PartedWeight


def read_sparse(weights: WeightReader, layer_prefix: str, spec: ModelSpec) -> SparseFeedForward:
    """The feed-forward of a layer with experts."""
    experts = spec.experts
    assert experts is not None, "called for sparse layers only"
    block, router = ROUTERS.get(experts.layout, ("mlp", "gate"))
    prefix, count = f"{layer_prefix}.{block}", experts.num_experts
    sparse = read_experts(weights, f"{prefix}.{router}", f"{prefix}.experts", spec)
    name = f"{prefix}.{router}.e_score_correction_bias"
    if experts.correction_bias and (weights.has(name) or not experts.may_lack_correction):
        shape = weights.shape(name) or (count,)
        sparse.correction = weights.keep(name, shape, dtype=torch.float32).view(count)
    if experts.shared_intermediate_size:
        name = f"{layer_prefix}.mlp.shared_experts"
        sparse.shared = read_feed_forward(weights, name, spec, experts.shared_intermediate_size)
    if experts.latent_size:
        hidden, width = spec.hidden_size, experts.latent_size
        taken, given = (f"{prefix}.{name}_latent_proj" for name in ("fc1", "fc2"))
        sparse.latent_in = read_linear(weights, [taken], [width], hidden, spec.mlp_bias)
        sparse.latent_out = read_linear(weights, [given], [hidden], width, spec.mlp_bias)
    if experts.shared_gate:
        # A row, or a plain vector in GGUF.
        name = f"{prefix}.shared_experts_gate.weight"
        shape = weights.shape(name) or (1, spec.hidden_size)
        gate = weights.take(name, shape, dtype=torch.float32).view(1, -1)
        sparse.shared_gate = Linear(weight=DenseWeight(values=gate))
    elif experts.halves_shared:
        # The sigmoid of 0, whatever it takes.
        gate = torch.zeros((1, spec.hidden_size), dtype=torch.float32, device=weights.device)
        sparse.shared_gate = Linear(weight=DenseWeight(values=gate))
    return sparse


def read_experts(weights: WeightReader, router: str, name: str, spec: ModelSpec) -> SparseFeedForward:
    """The router of that name, and the experts that are held here."""
    experts = spec.experts
    assert experts is not None, "called for sparse layers only"
    count = experts.num_experts
    weight = weights.take(f"{router}.weight", (count, spec.hidden_size), dtype=torch.float32)
    bias = None
    if experts.layout in ("gpt_oss", "biased"):
        bias = weights.take(f"{router}.bias", (count,), dtype=torch.float32)
    found = LAYOUTS[experts.layout](weights, name, spec, experts)
    together = experts_together(found, weights.kernels)
    return SparseFeedForward(
        spec=experts,
        router=Linear(weight=DenseWeight(values=weight), bias=bias),
        # Together they have their own copy of the weights.
        experts=found if together is None else [],
        activation=spec.activation,
        together=together,
    )


def _num_held(weights: WeightReader, experts: ExpertSpec) -> int:
    return len(weights.shard.held(experts.num_experts))


def _expert(spec: ModelSpec, gate_up: Weight, down: Weight, *biases: Tensor) -> FeedForward:
    first, second = biases or (None, None)
    return FeedForward(
        gate_up=Linear(weight=gate_up, bias=first),
        down=Linear(weight=down, bias=second),
        activation=spec.activation,
        plain=not spec.gated,
    )


def _named_experts(*names: str) -> Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[FeedForward]]:
    """Experts whose gate (where they have one), up and down are a tensor each, named so."""

    def read(weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec) -> list[FeedForward]:
        if weights.has(f"{prefix}.gate_up_proj"):
            # Newer checkpoints of the same families.
            if weights.shard.degrees.expert_parts > 1:
                raise CheckpointError(
                    f"{weights.folder}: experts lie in one tensor, of which ranks read no parts; set "
                    f"engine.parallel.expert = {weights.shard.degrees.stage_size}, which gives each rank "
                    "whole experts"
                )
            return _stacked_experts(weights, prefix, spec, experts)
        size, hidden = experts.intermediate_size, experts.latent_size or spec.hidden_size
        gate_ups, downs, biases = [], [], []
        for index in weights.shard.held(experts.num_experts):
            *entering, down_name = (f"{prefix}.{index}.{name}" for name in names)
            entering = entering if spec.gated else entering[1:]
            gate_ups.append(weights.linear(entering, [size] * len(entering), hidden))
            downs.append(weights.linear([down_name], [hidden], size))
            biases.append(_biases(weights, entering, down_name, spec, experts))
        parts = zip(_in_equal_parts(gate_ups, size, weights.dtype), downs, biases, strict=True)
        return [_expert(spec, gate_up, down, *own) for gate_up, down, own in parts]

    return read


def _biases(
    weights: WeightReader, entering: list[str], down: str, spec: ModelSpec, experts: ExpertSpec
) -> tuple[Tensor, ...]:
    """Of what enters an expert, and of what it gives; none where the layout has none."""
    if experts.layout != "biased":
        return ()
    first = [weights.take(f"{name}.bias", (experts.intermediate_size,)) for name in entering]
    return torch.cat(first), weights.take(f"{down}.bias", (spec.hidden_size,))


def _in_equal_parts(given: list[Weight], size: int, dtype: torch.dtype) -> list[Weight]:
    """Weights of gates and as many others, cut between them in all experts where one is in parts: products
    take parts of all experts at once, which must have one size.
    """
    if len({len(parts_of(weight)) for weight in given}) == 1:
        return given
    found: list[Weight] = []
    for weight in given:
        if isinstance(weight, PartedWeight):
            found.append(weight)
            continue
        whole = unblocked(weight, dtype)
        halves = rows_of(whole, slice(size)), rows_of(whole, slice(size, None))
        found.append(PartedWeight(parts=halves))
    return found


def _fused_experts(
    weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec
) -> list[FeedForward]:
    """Experts whose gate and up are one tensor, gates first."""
    size, hidden, found = experts.intermediate_size, spec.hidden_size, []
    for index in weights.shard.held(experts.num_experts):
        gate_up = weights.linear([f"{prefix}.{index}.gate_up_proj"], [2 * size], hidden)
        found.append(_expert(spec, gate_up, weights.linear([f"{prefix}.{index}.down_proj"], [hidden], size)))
    return found


def _gpt_oss_experts(
    weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec
) -> list[FeedForward]:
    """All experts in one tensor each, inputs first, gate and up taking turns; biases everywhere."""
    count, hidden, size = _num_held(weights, experts), spec.hidden_size, experts.intermediate_size
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


def _stacked_experts(
    weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec
) -> list[FeedForward]:
    """All experts in one tensor each, gates before the rest. What its family stores with inputs first may
    have been saved the other way, which the shape shows.
    """
    count, hidden, size = _num_held(weights, experts), spec.hidden_size, experts.intermediate_size
    is_turned = hidden != 2 * size and weights.shape(f"{prefix}.gate_up_proj") == (count, 2 * size, hidden)
    first = experts.layout == "inputs_first" and not is_turned
    gate_up = weights.stacked(f"{prefix}.gate_up_proj", (count, 2 * size, hidden), inputs_first=first)
    down = weights.stacked(f"{prefix}.down_proj", (count, hidden, size), inputs_first=first)
    return [
        _expert(spec, weights.quantized(gate_up(index)), weights.quantized(down(index)))
        for index in range(count)
    ]


# Layout to the names of its block and of the router inside it, where they are not those of "separate".
ROUTERS = {"mixtral": ("block_sparse_moe", "gate"), "gpt_oss": ("mlp", "router")}
LAYOUTS: dict[str, Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[FeedForward]]] = {
    "separate": _named_experts("gate_proj", "up_proj", "down_proj"),
    "fused": _fused_experts,
    "mixtral": _named_experts("w1", "w3", "w2"),
    "gpt_oss": _gpt_oss_experts,
    "biased": _named_experts("gate_proj", "up_proj", "down_proj"),
    "stacked": _stacked_experts,
    "inputs_first": _stacked_experts,
}
