"""The native ops of a sparse feed-forward layer (experts.h).

Shape letters: T tokens, E hidden size, X experts, A active experts, P = T A places, I intermediate size.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int64
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kernels.activation.native import KINDS, ActivationArgs
from kernels.experts.routing import Routing
from kernels.host import Values, address_of, empty, row_stride
from kernels.linear.packed import (
    INPUT_MULTIPLE,
    PackedWeight,
    PackedWeightStruct,
    gemm_args,
    make_workspace,
    product_ops,
)
from kernels.native.library import NativeLibrary, Op
from kernels.native.mirror import structure

SCORINGS = {"softmax": 0, "softmax_of_best": 1, "sigmoid": 2, "sparse_mixer": 3}
GROUP_SCORES = {"best": 0, "two_best": 1}


@dataclass(frozen=True, kw_only=True)
class SparseLayer:
    """Packed weights of one layer: router [X, E], and for each expert [2 I, E] (gates first), or [I, E] where
    it is `plain`, and [E, I]. The first of these may have parts side by side, of equal sizes in all experts.
    """

    routing: Routing
    router: PackedWeight
    # Of the experts that are held here.
    gate_up: Sequence[Sequence[PackedWeight]]
    down: Sequence[PackedWeight]
    activation: str
    correction: Values | None = None  # [X] float32, takes part in the choice alone
    expert_scales: Values | None = None  # [X] float32, what their shares are multiplied by
    plain: bool = False


class WeightsByPlace:
    """The weights of a layer's held experts, place by place, as all ops over them find them: what is put into
    a place is what they compute with from the next step on.
    """

    def __init__(self, gate_up: Sequence[Sequence[PackedWeight]], down: Sequence[PackedWeight]) -> None:
        """As in SparseLayer."""
        # By part of what goes into the activation, and then what comes out of it.
        self.by_part = [
            (PackedWeightStruct * len(weights))(*[weight.struct for weight in weights])
            for weights in (*zip(*gate_up, strict=True), down)
        ]


@dataclass(frozen=True, kw_only=True)
class ExpertsApart:
    """What a layer's ops do where others hold the rest of the experts, or of what these are made of."""

    # The first position whose expert is held here.
    first: int
    # Where rows [P, E] of the held ones go, among the places of all experts, and those of all parts of them.
    rows: Values
    parts: Values  # [parts, P, E]
    # Waits until all have put theirs there.
    meet: Op
    # Where each expert stands among all [X] int64, and the rows that it got so far; None: by their numbers,
    # and nobody counts.
    positions: Values | None = None
    counts: Values | None = None
    # Where experts may change places; None: weights stay those of the layer.
    placed: WeightsByPlace | None = None


class ExpertBuffers:
    """What lies between the ops of a sparse layer; one serves all layers of a program in turn."""

    def __init__(
        self,
        library: NativeLibrary,
        routing: Routing,
        *,
        max_tokens: int,
        hidden_size: int,
        width: int = 0,
        intermediate_size: int,
        num_threads: int,
        plain: bool = False,
    ) -> None:
        """The router takes `hidden_size` elements; experts take and give `width`, which is as many where 0.
        `plain`: experts have no gates.
        """
        experts, active, width = routing.num_experts, routing.num_active, width or hidden_size
        num_places = max_tokens * active
        self.logits = empty((max_tokens, experts))
        self.ids = empty((max_tokens, active), np.int64)
        self.shares = empty((max_tokens, active))
        self.num_places = np.zeros(1, np.int64)
        self.starts = empty((experts + 1,), np.int64)
        self.places = empty((num_places,), np.int64)
        self.ranks = empty((num_places,), np.int64)
        self.gate_up = empty((num_places, (1 if plain else 2) * intermediate_size))
        self.changes = empty((num_places, width))
        self.router_workspace = make_workspace(library, max_tokens, hidden_size, num_threads)
        widest = -(-max(width, intermediate_size) // INPUT_MULTIPLE) * INPUT_MULTIPLE
        needed = library.function("millrace_expert_workspace", c_int64, (c_int64,) * 3)
        self.workspace = empty((int(needed(num_places, experts, widest)),), np.uint8)


def sparse_ops(
    library: NativeLibrary,
    layer: SparseLayer,
    buffers: ExpertBuffers,
    num_rows: int,
    x: Values,
    out: Values,
    *,
    accumulate: bool,
    asked: Values | None = None,
    apart: ExpertsApart | None = None,
) -> list[Op]:
    """Ops that compute out [T, E] (+)= the layer of x [T, E]; `num_rows` is the address of T as int64.

    Rows of x and out may lie in wider ones; they must not overlap unless `accumulate` is false.
    The router takes x, or what it is `asked` [T, E]. `apart`: not all of the experts are held here.
    """
    routing, width = layer.routing, layer.down[0].inputs
    first, held = (0, routing.num_experts) if apart is None else (apart.first, len(layer.down))
    assert len(layer.gate_up) == len(layer.down) == held, "weights of every expert"
    gate_up = buffers.gate_up
    rows = buffers.changes if apart is None else apart.rows
    changes = buffers.changes if apart is None else apart.parts[0]
    plan = structure("ExpertPlanArgs")(
        num_rows,
        address_of(buffers.ids),
        address_of(buffers.num_places),
        address_of(buffers.starts),
        address_of(buffers.places),
        address_of(buffers.ranks),
        routing.num_experts,
        routing.num_active,
        first_held=first,
        num_held=held,
        positions=None if apart is None or apart.positions is None else address_of(apart.positions),
        counts=None if apart is None or apart.counts is None else address_of(apart.counts),
    )
    shares = address_of(buffers.shares)
    activation = ActivationArgs(
        num_rows=address_of(buffers.num_places),
        gate_up=address_of(gate_up),
        out=address_of(gate_up),
        width=width,
        out_stride=row_stride(gate_up),
        kind=KINDS[layer.activation],
        plain=int(layer.plain),
        # The product before is linear: what multiplies its inputs may multiply what it gave.
        factors=shares if routing.weighs_inputs else None,
        places=address_of(buffers.places),
    )
    total = structure("ExpertSumArgs")(
        num_rows,
        None if routing.weighs_inputs else shares,
        address_of(buffers.ranks),
        address_of(changes),
        address_of(out),
        routing.num_active,
        layer.down[0].outputs,
        row_stride(changes),
        row_stride(out),
        int(accumulate),
        num_parts=1 if apart is None else len(apart.parts),
        part_stride=changes.size,
    )
    placed = apart.placed if apart is not None and apart.placed else WeightsByPlace(layer.gate_up, layer.down)
    product = partial(_expert_products, library, buffers, routing, first, layer)
    return [
        *_route_ops(library, layer, buffers, num_rows, x if asked is None else asked),
        Op(library, "expert_plan", plan, buffers, apart),
        *_gate_up_ops(product, layer, placed, buffers, x),
        Op(library, "activation", activation, buffers),
        *product(placed.by_part[-1], gate_up, rows, among_all=True),
        *([] if apart is None else [apart.meet]),
        Op(library, "expert_sum", total, buffers, out, apart),
    ]


def _route_ops(
    library: NativeLibrary, layer: SparseLayer, buffers: ExpertBuffers, num_rows: int, asked: Values
) -> list[Op]:
    """The choice of experts."""
    routing, correction = layer.routing, layer.correction
    router = gemm_args(
        layer.router,
        num_rows,
        address_of(asked),
        address_of(buffers.logits),
        address_of(buffers.router_workspace),
        x_stride=row_stride(asked),
    )
    args = structure("RouteArgs")(
        num_rows,
        address_of(buffers.logits),
        None if correction is None else address_of(correction),
        address_of(buffers.ids),
        address_of(buffers.shares),
        routing.num_experts,
        routing.num_active,
        SCORINGS[routing.scoring],
        int(routing.normalized),
        routing.num_groups,
        routing.num_active_groups,
        GROUP_SCORES[routing.group_score],
        routing.scaling,
        routing.tolerance,
        None if layer.expert_scales is None else address_of(layer.expert_scales),
    )
    return [
        *product_ops(library, router, layer, buffers, asked),
        Op(library, "route", args, buffers, layer),
    ]


def _gate_up_ops(
    product: Callable[..., list[Op]],
    layer: SparseLayer,
    placed: WeightsByPlace,
    buffers: ExpertBuffers,
    x: Values,
) -> list[Op]:
    """What goes into the activation, part by part."""
    ops, begin = [], 0
    for part, structs in zip(layer.gate_up[0], placed.by_part[:-1], strict=True):
        ops += product(structs, x, buffers.gate_up[:, begin:], buffers.places)
        begin += part.outputs
    return ops


def _expert_products(
    library: NativeLibrary,
    buffers: ExpertBuffers,
    routing: Routing,
    first: int,
    layer: SparseLayer,
    structs: ctypes.Array[Any],
    x: Values,
    out: Values,
    places: Values | None = None,
    *,
    among_all: bool = False,
) -> list[Op]:
    args = structure("ExpertGemmArgs")(
        address_of(buffers.starts[first:]),
        None if places is None else address_of(places),
        address_of(x),
        address_of(out),
        address_of(buffers.workspace),
        ctypes.addressof(structs),
        len(structs),
        routing.num_active,
        row_stride(x),
        row_stride(out),
        int(among_all),
    )
    keep = (structs, layer, buffers, x, out)
    return [Op(library, "expert_rows", args, *keep), Op(library, "expert_gemm", args, *keep)]
