"""Sparse feed-forward layers: a router picks experts for each token.

Each expert computes its own tokens, padded to 16 rows, and a token adds its experts in its own fixed order;
so no token's result depends on who else chose the same expert.

Shape letters: T tokens, E hidden size, X experts, A active experts, I intermediate size, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.linear import ROW_MULTIPLE, DenseWeight, GroupedProduct, WeightFormat
from engine.kernels.linear.formats import rows_of
from engine.kernels.selection import Kernels
from engine.model.layers import FeedForward, Linear
from engine.model.spec import ExpertSpec, ModelSpec
from engine.model.weights import WeightReader


class Router:
    """Scores the experts in float32 and picks the active ones."""

    def __init__(self, weights: WeightReader, name: str, spec: ModelSpec, experts: ExpertSpec) -> None:
        self.experts = experts
        shape = (experts.num_experts, spec.hidden_size)
        weight = DenseWeight(values=weights.take(f"{name}.weight", shape, dtype=torch.float32))
        bias = None
        if experts.layout == "gpt_oss":
            bias = weights.take(f"{name}.bias", shape[:1], dtype=torch.float32)
        self.product = Linear.of(weight, weights.kernels.linear, bias)
        self.correction: Tensor | None = None
        if experts.correction_bias:
            self.correction = weights.keep(f"{name}.e_score_correction_bias", shape[:1], dtype=torch.float32)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, E] -> ids [T, A] and weights [T, A] in float32."""
        experts = self.experts
        logits = self.product(x.float())
        if experts.scoring == "softmax_of_best":
            best = torch.topk(logits, experts.num_active, dim=-1)
            return best.indices, torch.softmax(best.values, -1)
        scores = (
            torch.softmax(logits, -1) if experts.scoring == "softmax" else 1.0 / (1.0 + torch.exp(-logits))
        )
        eligible = scores if self.correction is None else scores + self.correction
        if experts.num_groups:
            eligible = self._best_groups(eligible)
        ids = torch.topk(eligible, experts.num_active, dim=-1).indices
        chosen = scores.gather(1, ids)
        if experts.normalized:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        return ids, chosen * experts.scaling

    def _best_groups(self, scores: Tensor) -> Tensor:
        """scores [T, X] with those outside the best groups of each token set to minus infinity."""
        experts = self.experts
        grouped = scores.view(scores.shape[0], experts.num_groups, -1)  # [T, G, X/G]
        if experts.group_score == "best":
            merit = grouped.amax(-1)
        else:
            merit = torch.topk(grouped, 2, dim=-1).values.sum(-1)
        best = torch.topk(merit, experts.num_active_groups, dim=-1).indices
        closed = torch.ones_like(merit, dtype=torch.bool).scatter(1, best, False)
        return grouped.masked_fill(closed[..., None], float("-inf")).flatten(1)


class Expert:
    """One gated feed-forward."""

    def __init__(
        self,
        kernels: Kernels,
        gate_up: WeightFormat,
        down: WeightFormat,
        biases: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        first, second = biases or (None, None)
        self._gate = kernels.gate
        self.gate_up = Linear.of(gate_up, kernels.linear, first)  # [2 I, E]
        self.down = Linear.of(down, kernels.linear, second)  # [E, I]

    def __call__(self, x: Tensor, activation: str) -> Tensor:
        """x [rows, E] -> [rows, E]; rows a multiple of 16."""
        return self.down(self._gate(activation, self.gate_up(x)))


class ExpertsTogether:
    """All experts of a layer in two grouped products, so that the host need not know who chose whom."""

    def __init__(
        self, experts: list[Expert], gate_up: GroupedProduct, down: GroupedProduct, kernels: Kernels
    ) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, kernels.gate
        self._biases: tuple[Tensor, Tensor] | None = None  # [X, 2 I], [X, E]
        gate_biases = [expert.gate_up.bias for expert in experts if expert.gate_up.bias is not None]
        down_biases = [expert.down.bias for expert in experts if expert.down.bias is not None]
        if gate_biases:
            self._biases = torch.stack(gate_biases), torch.stack(down_biases)

    @classmethod
    def of(cls, experts: list[Expert], kernels: Kernels) -> ExpertsTogether | None:
        """The experts as the back end groups them, or None where it cannot."""
        gate_up = kernels.linear.grouped([_weight(expert.gate_up) for expert in experts])
        if gate_up is None:
            return None
        down = kernels.linear.grouped([_weight(expert.down) for expert in experts])
        return None if down is None else cls(experts, gate_up, down, kernels)

    def __call__(self, x: Tensor, ids: Tensor, activation: str) -> Tensor:
        """x [T, E], ids [T, A] -> [T * A, E], each token's experts side by side."""
        flat = ids.flatten()
        groups = self._gate_up.group(flat.int())
        inner = self._gate_up(x, groups, rows_per_input=ids.shape[1])
        if self._biases is not None:
            inner = inner + self._biases[0].index_select(0, flat)
        out = self._down(self._gate(activation, inner), groups, rows_per_input=1)
        return out if self._biases is None else out + self._biases[1].index_select(0, flat)


def _weight(linear: Linear) -> WeightFormat:
    assert linear.weight is not None, "not packed yet"
    return linear.weight


class SparseFeedForward:
    """Router, experts, and perhaps a shared feed-forward that every token passes."""

    def __init__(self, weights: WeightReader, layer_prefix: str, spec: ModelSpec) -> None:
        experts = spec.experts
        assert experts is not None, "called for sparse layers only"
        block, router = ROUTERS[experts.layout]
        self.router = Router(weights, f"{layer_prefix}.{block}.{router}", spec, experts)
        self.experts = LAYOUTS[experts.layout](weights, f"{layer_prefix}.{block}.experts", spec, experts)
        self.together = ExpertsTogether.of(self.experts, weights.kernels)
        if self.together is not None:
            # It has its own copy of the weights.
            self.experts = []
        self.activation = spec.activation
        self.shared: FeedForward | None = None
        if experts.shared_intermediate_size:
            name = f"{layer_prefix}.{block}.shared_experts"
            self.shared = FeedForward(weights, name, spec, experts.shared_intermediate_size)

    # Its input goes to the router, too.
    entry = None

    def routed_linears(self) -> Iterator[Linear]:
        """The router's product and the experts' own."""
        yield self.router.product
        for expert in self.experts:
            yield expert.gate_up
            yield expert.down

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, E] -> [T, E]."""
        ids, shares = self.router(x)
        num_active = ids.shape[1]
        together = self.together
        results = self._in_turn(x, ids) if together is None else together(x, ids, self.activation)
        each = results.view(-1, num_active, x.shape[1]).float() * shares[..., None]
        total = each[:, 0]
        for place in range(1, num_active):
            total = total + each[:, place]
        out = total.to(x.dtype)
        return out if self.shared is None else out + self.shared(x)

    def _in_turn(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [T, E], ids [T, A] -> [T * A, E]; the host learns how many rows each expert has."""
        num_active = ids.shape[1]
        order = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()
        results = x.new_empty(order.shape[0], x.shape[1])
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if not count:
                continue
            places = order[start : start + count]
            start += count
            rows = F.pad(x.index_select(0, places // num_active), (0, 0, 0, -count % ROW_MULTIPLE))
            results[places] = expert(rows, self.activation)[:count]
        return results


def _named_experts(*names: str) -> Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[Expert]]:
    """Experts whose gate, up and down are three tensors each, named so."""

    def read(weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec) -> list[Expert]:
        size, hidden = experts.intermediate_size, spec.hidden_size
        found = []
        for index in range(experts.num_experts):
            gate_name, up_name, down_name = (f"{prefix}.{index}.{name}" for name in names)
            gate_up = weights.linear([gate_name, up_name], [size, size], hidden)
            found.append(Expert(weights.kernels, gate_up, weights.linear([down_name], [hidden], size)))
        return found

    return read


def _gpt_oss_experts(
    weights: WeightReader, prefix: str, spec: ModelSpec, experts: ExpertSpec
) -> list[Expert]:
    """All experts in one tensor each, inputs first, gate and up taking turns; biases everywhere."""
    count, hidden, size = experts.num_experts, spec.hidden_size, experts.intermediate_size
    gate_up = weights.stacked(f"{prefix}.gate_up_proj", (count, 2 * size, hidden))
    gate_up_bias = weights.take(f"{prefix}.gate_up_proj_bias", (count, 2 * size))
    down = weights.stacked(f"{prefix}.down_proj", (count, hidden, size))
    down_bias = weights.take(f"{prefix}.down_proj_bias", (count, hidden))
    turns = torch.cat((torch.arange(0, 2 * size, 2), torch.arange(1, 2 * size, 2))).to(weights.device)
    return [
        Expert(
            weights.kernels,
            weights.quantized(rows_of(gate_up(index), turns)),
            weights.quantized(down(index)),
            (gate_up_bias[index][turns], down_bias[index]),
        )
        for index in range(count)
    ]


# Layout to the names of its block and of the router inside it.
ROUTERS = {"separate": ("mlp", "gate"), "mixtral": ("block_sparse_moe", "gate"), "gpt_oss": ("mlp", "router")}
LAYOUTS: dict[str, Callable[[WeightReader, str, ModelSpec, ExpertSpec], list[Expert]]] = {
    "separate": _named_experts("gate_proj", "up_proj", "down_proj"),
    "mixtral": _named_experts("w1", "w3", "w2"),
    "gpt_oss": _gpt_oss_experts,
}
