"""flash-attn as it is documented, in plain torch, checking what the real one checks.

Shapes as in kernels.attention.flash_library. Version 2 takes `block_table` in its varlen function, of
pages of multiples of 256; version 3 takes a `page_table` of any pages beside the cache.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def modules(page_multiple: int = 256) -> dict[str, Any]:
    """Name to module of both versions, with the calls that were made in `calls`."""
    calls: list[dict[str, Any]] = []

    def varlen_2(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.append({"paged": block_table is not None, "window_size": window_size, "softcap": softcap})
        if block_table is not None and k.shape[1] % page_multiple:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {page_multiple}")
        return _attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), block_table, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip

    def varlen_3(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
    ) -> tuple[Tensor, None]:
        calls.append({"paged": False, "window_size": window_size, "softcap": softcap})
        out = _attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k.diff(), None, max_seqlen_q, max_seqlen_k,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip
        return out, None

    def with_cache_3(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        num_splits: int = 0,
    ) -> Tensor:
        calls.append({"paged": True, "num_splits": num_splits, "strides": k_cache.stride()})
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.is_contiguous()
        longest = int(cache_seqlens.max())
        return _attend(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q, longest,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip

    return {
        "flash_attn": SimpleNamespace(
            __version__="2.8.3", flash_attn_varlen_func=varlen_2, calls=calls, __spec__=None
        ),
        "flash_attn_interface": SimpleNamespace(
            flash_attn_varlen_func=varlen_3, flash_attn_with_kvcache=with_cache_3, calls=calls
        ),
    }


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    query_starts: Tensor,
    lens: Tensor,
    tables: Tensor | None,
    max_query_len: int,
    max_key_len: int,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    soft_cap: float,
) -> Tensor:
    """q [T, H, D]; keys [U, K, D], or pages [N, P, K, D] with tables [S, C]."""
    assert q.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16"
    assert keys.dtype == values.dtype == q.dtype, "one type for all"
    assert query_starts.dtype == torch.int32, "cu_seqlens_q must have dtype int32"
    assert query_starts.is_contiguous()
    assert q.stride(-1) == keys.stride(-1) == values.stride(-1) == 1, "contiguous last dimension"
    assert q.shape[0] == int(query_starts[-1]), "rows of nobody"
    assert max_query_len == int(query_starts.diff().max())
    assert max_key_len == int(lens.max())
    group = q.shape[1] // keys.shape[-2]
    out = torch.full_like(q, float("nan"))
    begin = 0
    for index, length in enumerate(lens.tolist()):
        first, last = query_starts[index : index + 2].tolist()
        if tables is None:
            some_keys, some_values = (part[begin : begin + length] for part in (keys, values))
            assert not some_keys.isnan().any(), "an unseen position was gathered"
            begin += length
        else:
            assert tables.dtype == torch.int32
            assert tables.stride(-1) == 1
            pages = tables[index, : -(-length // keys.shape[1])].long()
            some_keys, some_values = (part[pages].flatten(0, 1)[:length] for part in (keys, values))
        expanded = [part.float().repeat_interleave(group, 1) for part in (some_keys, some_values)]
        scores = torch.einsum("qhd,khd->hqk", q[first:last].float(), expanded[0])
        scores *= q.shape[-1] ** -0.5 if scale is None else scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        # Aligned to the bottom right: query i stands at key i + length - number of queries.
        distance = torch.arange(length) - torch.arange(length - (last - first), length)[:, None]
        right = 0 if causal else window[1]
        hidden = (distance > right) if right >= 0 else torch.zeros_like(distance, dtype=torch.bool)
        if window[0] >= 0:
            hidden |= distance < -window[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, expanded[1]).to(q.dtype)
    if tables is None:
        assert begin == keys.shape[0], "positions of nobody"
    return out
