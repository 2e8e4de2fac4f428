"""What attention over a bfloat16 cache loses on the CPU, beside torch's attention in bfloat16.

`python -m benchmarks.kernels.attention_accuracy_cpu [--json FILE]`: the root of the mean square of the error,
in thousandths of that of the exact results (float64, from the same cache), of the last 64 tokens of 1,024.
"queries rounded" is what rounding queries to bfloat16 costs by itself; "float32" has both products in
float32, and "as served" is what the best level of this machine does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.engine.report import arguments, publish
from kernels.attention import AttentionOptions, NativeAttention, RaggedBatch
from kernels.paged_cache import allocate_layer

TOKENS, NEW, HEADS, KV_HEADS, DIM, BLOCK = 1024, 64, 16, 8, 128, 16
CPU = torch.device("cpu")
SCALE = DIM**-0.5
KINDS = (
    "random",
    "almost equal weights",
    "values of one sign",
    "one channel of values 100 times the others",
    "values a hundredth",
    "first key takes most, its value is small",
)


def operands(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, D] in float32; keys and values [L, K, D] in bfloat16."""
    q, keys, values = (
        torch.randn(*shape, DIM) for shape in ((NEW, HEADS), (TOKENS, KV_HEADS), (TOKENS, KV_HEADS))
    )
    if kind == KINDS[1]:
        q *= 0.1
    if kind == KINDS[2]:
        values = values.abs()
    if kind == KINDS[3]:
        values[..., 7] *= 100
    if kind == KINDS[4]:
        values *= 0.01
    if kind == KINDS[5]:
        q[..., 0] = 10
        keys[0, :, 0] = 10
        values[0] *= 0.01
    return q, keys.bfloat16(), values.bfloat16()


def attention(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[T, H, D] by torch, in the operands' type."""
    group = HEADS // KV_HEADS
    k, v = (tensor.repeat_interleave(group, 1).transpose(0, 1)[None] for tensor in (keys, values))
    seen = torch.ones(NEW, TOKENS, dtype=torch.bool).tril(TOKENS - NEW)
    return scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, seen, scale=SCALE)[0].transpose(0, 1)


def ours(q: Tensor, keys: Tensor, values: Tensor, *, pairs: bool | None) -> Tensor:
    """[T, H, D] by the native kernels."""
    count = TOKENS // BLOCK
    cache = allocate_layer(
        num_blocks=count,
        block_size=BLOCK,
        num_heads=KV_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        shared_value_dim=0,
        dtype=torch.bfloat16,
        device=CPU,
    )
    cache.write(keys, values, torch.arange(TOKENS))
    batch = RaggedBatch(
        query_starts=np.array([0, NEW]),
        context_lens=np.array([TOKENS]),
        block_tables=np.arange(count)[None],
        block_size=BLOCK,
    )
    native = NativeAttention(num_heads=HEADS, num_kv_heads=KV_HEADS, num_threads=1, pairs=pairs)
    return native.run(native.plan(batch, CPU), q, cache, AttentionOptions(scale=SCALE))


def row(kind: str) -> dict[str, str | float | int]:
    """Errors of one kind of operands."""
    q, keys, values = operands(kind)
    exact = attention(q.double(), keys.double(), values.double())

    def error(found: Tensor) -> float:
        return float(1000 * (found.double() - exact).pow(2).mean().sqrt() / exact.pow(2).mean().sqrt())

    return {
        "operands": kind,
        "baseline: torch bfloat16": error(attention(q.bfloat16(), keys, values)),
        "queries rounded": error(attention(q.bfloat16().double(), keys.double(), values.double())),
        "float32": error(ours(q, keys, values, pairs=False)),
        "as served": error(ours(q, keys, values, pairs=None)),
    }


def main() -> None:
    """Measures and prints."""
    options = arguments(__doc__ or "")
    torch.manual_seed(0)
    publish("Errors of attention over bfloat16, in thousandths", [row(kind) for kind in KINDS], options.json)


if __name__ == "__main__":
    main()
