"""Experts as real models launch them: what compile_ahead compiles; their products are in linear/variants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from kernels.experts.routing import Routing
from kernels.experts.triton_experts import combine, route
from kernels.linear.triton_rows import GroupedRows

TOKENS, HIDDEN = 5, 2048
ROUTINGS = {
    "Mixtral": Routing(num_experts=8, num_active=2, scoring="softmax_of_best"),
    "Qwen3": Routing(num_experts=128, num_active=8),
    "DeepSeek-V3": Routing(
        num_experts=256,
        num_active=8,
        scoring="sigmoid",
        num_groups=8,
        num_active_groups=4,
        group_score="two_best",
    ),
}


def variants() -> Iterator[tuple[str, Callable[[], object]]]:
    """The choice, its order for products, for few tokens and many, and the sum."""
    for name, routing in ROUTINGS.items():
        logits = torch.empty(TOKENS, routing.num_experts, device="meta")
        correction = torch.empty(routing.num_experts, device="meta") if routing.num_groups else None
        yield f"route, {name}", partial(route, logits, routing, correction)
        for rows in (TOKENS * routing.num_active, 8192 * routing.num_active):
            choice = torch.empty(rows, dtype=torch.int32, device="meta")
            yield f"group {rows} rows, {name}", partial(GroupedRows.of, choice, routing.num_experts)
        results = torch.empty(TOKENS * routing.num_active, HIDDEN, dtype=torch.bfloat16, device="meta")
        shares = torch.empty(TOKENS, routing.num_active, device="meta")
        yield f"combine, {name}", partial(combine, results, shares, results[:TOKENS])
