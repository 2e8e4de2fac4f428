"""What attention over bfloat16 caches loses, at every level of this machine, beside what rounding loses.

`python -m benchmarks.kernels.attention_accuracy_cpu [--json FILE]`: the root of the mean square of the
error, in thousandths of that of the exact results (float64, from the keys and values that the cache holds),
for a prompt of 1,024 tokens, over random operands and over such as make sums in float16 hard. "q, P rounded"
is what rounding queries and weights to bfloat16 costs by itself, "k, v rounded" what storing them so does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from benchmarks.engine.report import arguments, publish
from engine.kernels.attention import AttentionOptions, NativeAttention, RaggedBatch
from engine.kernels.native.build import machine_levels
from engine.kernels.native.library import load_level
from engine.kernels.paged_cache import LayerCache, allocate_layer

CPU = torch.device("cpu")
TOKENS, HEADS, KV_HEADS, DIM, BLOCK = 1024, 4, 2, 128, 16
KINDS = (
    "random",
    "scores times 4",
    "one element of keys times 50",
    "queries and keys of one sign",
    "values of one sign",
    "some keys times 1,000, some values times 200",
    "values times 0.0001",
)


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D], keys and values [K, T, D], in float32."""
    q, k, v = (torch.randn(shape) for shape in ((TOKENS, HEADS, DIM), *[(KV_HEADS, TOKENS, DIM)] * 2))
    if kind == KINDS[1]:
        q *= 4
    elif kind == KINDS[2]:
        k[..., 7] *= 50
    elif kind == KINDS[3]:
        q, k = q.abs(), k.abs()
    elif kind == KINDS[4]:
        v = v.abs()
    elif kind == KINDS[5]:
        q *= 0.01
        k[:, ::50] *= 1000
        v[:, ::77] *= 200
    elif kind == KINDS[6]:
        v *= 1e-4
    return q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor, *, round_weights: bool = False) -> Tensor:
    """Causal attention in float64 [T, H, D]."""
    keys, values = (x.double().repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    scores = torch.einsum("thd,hld->htl", q.double(), keys) * DIM**-0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if round_weights:
        weights = weights.bfloat16().double()
    return torch.einsum("htl,hld->thd", weights / total, values)


def cache_of(k: Tensor, v: Tensor) -> LayerCache:
    """A cache that holds bfloat16 keys and values in ascending blocks."""
    cache = allocate_layer(
        num_blocks=TOKENS // BLOCK,
        block_size=BLOCK,
        num_heads=KV_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        shared_value_dim=0,
        dtype=torch.bfloat16,
        device=CPU,
    )
    for tensor, held in zip(cache.tensors(), (k, v), strict=False):
        tensor[: TOKENS // BLOCK].copy_(held.view(KV_HEADS, -1, BLOCK, DIM).transpose(0, 1))
    return cache


def row(kind: str) -> dict[str, str | float | int]:
    """Errors of one kind of operands."""
    q, k, v = operands(kind)
    keys, values = k.bfloat16(), v.bfloat16()
    reference = exact(q, keys, values)

    def error(found: Tensor) -> float:
        return float(
            1000 * (found.double() - reference).pow(2).mean().sqrt() / reference.pow(2).mean().sqrt()
        )

    all_keys, all_values = (x.repeat_interleave(HEADS // KV_HEADS, 0)[None] for x in (keys, values))
    by_torch = torch.nn.functional.scaled_dot_product_attention(
        q.bfloat16().transpose(0, 1)[None], all_keys, all_values, is_causal=True
    )
    found: dict[str, str | float | int] = {
        "operands": kind,
        "baseline: torch bfloat16": error(by_torch[0].transpose(0, 1)),
        "q, P rounded": error(exact(q.bfloat16(), keys, values, round_weights=True)),
        "k, v rounded": error(exact(q, k, v)),
    }
    cache = cache_of(keys, values)
    batch = RaggedBatch(
        query_starts=np.array([0, TOKENS]),
        context_lens=np.array([TOKENS]),
        block_tables=np.arange(TOKENS // BLOCK)[None],
        block_size=BLOCK,
    )
    for level in machine_levels():
        backend = NativeAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, library=load_level(level))
        plan = backend.plan(batch, CPU)
        found[level] = error(backend.run(plan, q, cache, AttentionOptions(scale=DIM**-0.5)))
    return found


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__ or "")
    torch.manual_seed(0)
    publish(
        "Errors of attention over bfloat16 caches, in thousandths",
        [row(kind) for kind in KINDS],
        options.json,
    )


if __name__ == "__main__":
    main()
