"""Attention, row kernels and draws, beside torch on the same shapes and what memory and matrix units give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.gpu import flashinfer_peer
from benchmarks.gpu.device import BLOCK_SIZE, Gpu, Roofs, Work
from benchmarks.gpu.report import Report
from benchmarks.in_process import DRAWS
from kernels.attention.ragged import AttentionOptions, RaggedBatch
from kernels.attention.triton_attention import TritonAttention
from kernels.paged_cache.store import LayerCache, allocate_layer

TITLE = "Attention and row kernels"
# Llama-3.1-8B: query heads, kv heads, head dim.
HEADS = (32, 8, 128)
# Of bfloat16 against another kernel's.
LARGEST_ERROR = 2e-2
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def run(gpu: Gpu, report: Report) -> None:
    """Prefill, decode, rows."""
    roofs = gpu.roofs()
    report.row(what="roofs", **roofs.fields())
    for length, chunk in gpu.pick(
        [(2048, 2048), (8192, 8192), (8192, 1024), (32768, 2048)], [(40, 40), (50, 20)]
    ):
        _guarded(report, lambda length=length, chunk=chunk: _prefill(gpu, report, roofs, length, chunk))
    for batch, length in gpu.pick([(1, 1024), (1, 32768), (16, 4096), (128, 1024), (256, 2048)], [(2, 40)]):
        for kind in DTYPES:
            _guarded(
                report,
                lambda batch=batch, length=length, kind=kind: _decode(
                    gpu, report, roofs, batch, length, kind
                ),
            )
    for rows in gpu.pick([128, 8192], [3]):
        _guarded(report, lambda rows=rows: _rows(gpu, report, roofs, rows))
    for rows in gpu.pick([1, 16, 128], [2]):
        for draw in DRAWS:
            _guarded(report, lambda rows=rows, draw=draw: _draws(gpu, report, roofs, rows, draw))


def _guarded(report: Report, measure: Callable[[], None]) -> None:
    """One shape that cannot be measured does not end the others."""
    try:
        measure()
    except Exception as error:
        report.failed(error)


def filled_cache(
    gpu: Gpu,
    batch: int,
    length: int,
    dtype: torch.dtype,
    *,
    block_size: int = BLOCK_SIZE,
    heads: tuple[int, int, int] = HEADS,
) -> tuple[LayerCache, np.ndarray[Any, np.dtype[np.int64]]]:
    """Random histories of `length` in shuffled blocks, and their tables."""
    _, num_kv_heads, dim = heads
    per_sequence = -(-length // block_size)
    cache = allocate_layer(
        num_blocks=batch * per_sequence,
        block_size=block_size,
        num_heads=num_kv_heads,
        key_dim=dim,
        value_dim=dim,
        shared_value_dim=0,
        dtype=dtype,
        device=gpu.device,
    )
    for tensor in cache.tensors():
        if tensor.dtype == torch.uint8:
            # Bytes of fp8 below 0x78 are finite and positive; sign and magnitude are as good as any.
            tensor.random_(0, 0x70)
        elif tensor.dtype == torch.int8:
            tensor.random_(-127, 128)
        elif tensor.dtype == torch.float32 and dtype in (torch.int8, torch.float8_e4m3fn):
            tensor.fill_(0.01)
        else:
            tensor.normal_()
    order = torch.randperm(batch * per_sequence, generator=torch.Generator().manual_seed(0))
    return cache, order.view(batch, per_sequence).numpy()


def ragged(lengths: list[int], new: list[int], tables: np.ndarray[Any, Any], block_size: int) -> RaggedBatch:
    """A step of sequences that compute their last `new` tokens."""
    return RaggedBatch(
        query_starts=np.concatenate(([0], np.cumsum(new))),
        context_lens=np.array(lengths),
        block_tables=tables,
        block_size=block_size,
    )


def backends() -> dict[str, Any]:
    """Ours, and flash-attn where it is installed."""
    num_heads, num_kv_heads, _ = HEADS
    found: dict[str, Any] = {"triton": TritonAttention(num_heads=num_heads, num_kv_heads=num_kv_heads)}
    try:
        from kernels.attention.flash import FlashAttention

        found["flash"] = FlashAttention(num_heads=num_heads, num_kv_heads=num_kv_heads)
    except Exception as error:
        print(f"    no flash-attn: {type(error).__name__}: {str(error)[:120]}", flush=True)
    return found


def torch_kernels(gpu: Gpu) -> dict[str, list[SDPBackend]]:
    """Torch's own attention: as it chooses, and each of its fast kernels."""
    found = {
        "torch SDPA": [
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
    }
    if not gpu.rehearses:
        found |= {
            "torch SDPA, flash": [SDPBackend.FLASH_ATTENTION],
            "torch SDPA, cuDNN": [SDPBackend.CUDNN_ATTENTION],
        }
    return found


def ours(backend: Any, batch: RaggedBatch, q: Tensor, cache: LayerCache) -> Work:
    """One call with everything that a step plans made before."""
    options = AttentionOptions(scale=q.shape[2] ** -0.5)
    plan = backend.plan(batch, q.device)
    # What is made when a layer first asks is made here.
    backend.run(plan, q, cache, options)
    return lambda: backend.run(plan, q, cache, options)


def _error(found: Tensor, expected: Tensor) -> float:
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    return float(difference)


def _prefill(gpu: Gpu, report: Report, roofs: Roofs, length: int, chunk: int) -> None:
    num_heads, num_kv_heads, dim = HEADS
    cache, tables = filled_cache(gpu, 1, length, gpu.dtype)
    q = torch.randn(chunk, num_heads, dim, device=gpu.device).to(gpu.dtype)
    batch = ragged([length], [chunk], tables, BLOCK_SIZE)
    keys, values = (
        part.to(gpu.dtype)[:, :, :length] for part in cache.gather(torch.from_numpy(tables).to(gpu.device))
    )
    # One key head per query head: not every kernel of torch knows groups.
    keys, values = (part.repeat_interleave(num_heads // num_kv_heads, 1) for part in (keys, values))
    queries = q.transpose(0, 1)[None]

    def sdpa() -> Tensor:
        if chunk == length:
            return F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mask = causal_lower_right(chunk, length)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

    visible = chunk * length - chunk * (chunk - 1) / 2
    flops = 4 * visible * num_heads * dim
    row = {"what": "prefill", "history": length, "new": chunk, "flops": flops}
    expected, best = None, float("inf")
    for name, kernel in torch_kernels(gpu).items():
        try:
            with sdpa_kernel(kernel):
                expected = sdpa()[0].transpose(0, 1)
                baseline = gpu.time(sdpa)
        except RuntimeError as error:
            print(f"    {name}: {str(error).splitlines()[0]}", flush=True)
            continue
        best = min(best, baseline.seconds)
        report.row(**row, by=name, **baseline.fields(), of_matrix_rate=_rate(flops, baseline, roofs))
    assert expected is not None, "torch has a kernel for every shape"
    if found := flashinfer_peer.timed(gpu, flashinfer_peer.prefill(cache, tables, q, length)):
        theirs, baseline = found
        best = min(best, baseline.seconds)
        report.row(
            **row,
            by="flashinfer",
            **baseline.fields(),
            of_matrix_rate=_rate(flops, baseline, roofs),
            relative_error=_error(theirs[0](), expected),
        )
    for name, backend in backends().items():
        work = ours(backend, batch, q, cache)
        found = work()
        timing = gpu.time(work)
        report.row(
            **row,
            by=name,
            **timing.fields(),
            of_matrix_rate=_rate(flops, timing, roofs),
            times_fastest_peer=best / timing.seconds,
            **_judged(report, _error(found, expected)),
        )


def _judged(report: Report, error: float) -> dict[str, Any]:
    """A row's error; one that no rounding explains makes its row a wrong result."""
    if not error < LARGEST_ERROR:
        report.num_wrong += 1
        return {"relative_error": error, "wrong": f"at most {LARGEST_ERROR} was expected"}
    return {"relative_error": error, "checked": True}


def _rate(flops: float, timing: Any, roofs: Roofs) -> float:
    return float(flops / timing.seconds / roofs.bf16_flops_per_s)


def _decode(gpu: Gpu, report: Report, roofs: Roofs, batch: int, length: int, kind: str) -> None:
    num_heads, num_kv_heads, dim = HEADS
    dtype = DTYPES[kind] if kind != "bf16" else gpu.dtype
    elements = 2 * batch * length * num_kv_heads * dim
    size = elements * dtype.itemsize + (0 if kind == "bf16" else 2 * 4 * batch * length * num_kv_heads)
    # As many caches as it takes that none is still in the L2 when its turn comes.
    copies = max(1, min(64, gpu.pick(300 << 20, 1) // size + 1))
    caches = [filled_cache(gpu, batch, length, dtype) for _ in range(copies)]
    q = torch.randn(batch, num_heads, dim, device=gpu.device).to(gpu.dtype)
    row = {"what": "decode", "batch": batch, "history": length, "kv": kind, "bytes": size}
    baseline = None
    if kind == "bf16":
        dense = [
            tuple(part.to(gpu.dtype) for part in cache.gather(torch.from_numpy(tables).to(gpu.device)))
            for cache, tables in caches[: max(1, min(copies, (8 << 30) // (2 * size)))]
        ]
        queries = q[:, :, None]
        works = [
            lambda keys=keys, values=values: F.scaled_dot_product_attention(
                queries, keys[:, :, :length], values[:, :, :length], enable_gqa=True
            )
            for keys, values in dense
        ]
        expected = works[0]()[:, :, 0]
        baseline = gpu.time(works)
        report.row(**row, by="torch SDPA", **baseline.fields(), of_bandwidth=_share(size, baseline, roofs))
        del dense, works
        if found := flashinfer_peer.timed(gpu, flashinfer_peer.decode(caches, q, length)):
            theirs, timing = found
            share = _share(size, timing, roofs)
            error = _error(theirs[0](), expected)
            report.row(**row, by="flashinfer", **timing.fields(), of_bandwidth=share, relative_error=error)
            baseline = min(baseline, timing, key=lambda each: each.seconds)
    for name, backend in backends().items():
        if name == "flash":
            continue  # decode rows are Triton's there, too
        steps = [
            ours(backend, ragged([length] * batch, [1] * batch, tables, BLOCK_SIZE), q, cache)
            for cache, tables in caches
        ]
        timing = gpu.time(steps)
        extra: dict[str, Any] = {}
        if baseline is not None:
            extra = {
                "times_fastest_peer": baseline.seconds / timing.seconds,
                **_judged(report, _error(steps[0](), expected)),
            }
        report.row(**row, by=name, **timing.fields(), of_bandwidth=_share(size, timing, roofs), **extra)


def _share(size: float, timing: Any, roofs: Roofs) -> float:
    return float(size / timing.seconds / roofs.bytes_per_s)


def _rows(gpu: Gpu, report: Report, roofs: Roofs, rows: int) -> None:
    from kernels.activation.triton_activation import gate
    from kernels.norm.triton_norm import rms_norm

    width, inner = gpu.pick((4096, 14336), (64, 96))
    copies = max(1, min(32, gpu.pick(300 << 20, 1) // (rows * width * 2) + 1))
    inputs = [torch.randn(rows, width, device=gpu.device).to(gpu.dtype) for _ in range(copies)]
    weight = torch.rand(width, device=gpu.device)
    gates = [torch.randn(rows, 2 * inner, device=gpu.device).to(gpu.dtype) for _ in range(min(copies, 8))]
    plain = weight.to(gpu.dtype)
    cases: list[tuple[str, float, list[Work], list[Work]]] = [
        (
            "norm with residual",
            4.0 * rows * width * 2,
            [lambda x=x: rms_norm(x, weight, 1e-5, inputs[0]) for x in inputs],
            [lambda x=x: F.rms_norm(x + inputs[0], (width,), plain, 1e-5) for x in inputs],
        ),
        (
            "silu gate",
            3.0 * rows * inner * 2,
            [lambda x=x: gate("silu", x) for x in gates],
            [lambda x=x: F.silu(x[:, :inner]) * x[:, inner:] for x in gates],
        ),
    ]
    for name, size, works, theirs in cases:
        baseline, timing = gpu.time(theirs), gpu.time(works)
        row = {"what": name, "rows": rows, "bytes": size}
        report.row(**row, by="torch", **baseline.fields(), of_bandwidth=_share(size, baseline, roofs))
        report.row(
            **row,
            by="triton",
            **timing.fields(),
            of_bandwidth=_share(size, timing, roofs),
            times_torch=baseline.seconds / timing.seconds,
        )


def _draws(gpu: Gpu, report: Report, roofs: Roofs, rows: int, draw: str) -> None:
    """Tokens from logits: torch's largest, or its sort, sum and multinomial, and the engine's draw."""
    from kernels.sampling.triton_sampling import RowOptions, process
    from kernels.sampling.triton_sampling import draw as drawn

    vocab_size, asked = gpu.pick(128_256, 500), DRAWS[draw]
    size = rows * vocab_size * 4
    copies = max(1, min(32, gpu.pick(300 << 20, 1) // size + 1))
    inputs = [3 * torch.randn(rows, vocab_size, device=gpu.device) for _ in range(copies)]
    numbers = torch.ones(rows, device=gpu.device)
    options = RowOptions(
        temperature=numbers * asked["temperature"],
        min_p=numbers * 0,
        top_k=(numbers * asked.get("top_k", 0)).int(),
        top_p=numbers * asked.get("top_p", 1.0),
        noise_keys=torch.arange(rows, device=gpu.device) * 7919,
        filters=draw == "sampled",
    )

    def by_sorting(logits: Tensor) -> Tensor:
        best, tokens = torch.sort(logits / asked["temperature"], dim=-1, descending=True)
        chances = torch.softmax(best[:, : asked["top_k"]], -1)
        chances = chances * (chances.cumsum(-1) - chances < asked["top_p"])
        return tokens.gather(1, torch.multinomial(chances, 1))

    def theirs(logits: Tensor) -> Tensor:
        return logits.argmax(-1) if draw == "greedy" else by_sorting(logits)

    row = {"what": "draw", "draw": draw, "rows": rows, "bytes": size}
    baseline = gpu.time([lambda logits=logits: theirs(logits) for logits in inputs])
    timing = gpu.time([lambda logits=logits: drawn(process(logits, options), options) for logits in inputs])
    report.row(**row, by="torch", **baseline.fields(), of_bandwidth=_share(size, baseline, roofs))
    report.row(
        **row,
        by="triton",
        **timing.fields(),
        of_bandwidth=_share(size, timing, roofs),
        times_torch=baseline.seconds / timing.seconds,
    )
