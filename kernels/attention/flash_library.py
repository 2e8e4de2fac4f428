"""Finds the flash-attn that is installed, and what it can do here.

Two packages, one set of semantics (causal masks are aligned to the bottom right, windows count keys to the
left): `flash_attn` (version 2: compute capability 8.0 and later) and `flash_attn_interface` (version 3, built
for Hopper alone). Releases differ in the pages that they take: version 3 takes any, version 2.8 multiples of
256 tokens, forks of it multiples of 16. So a page size is tried out, once, when a library is found.

Shape letters: T query tokens, S sequences, U key tokens, H query heads, K kv heads, D head dim, N blocks, P
block size, C blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

# Version 2 learnt soft caps in 2.6 and pages in 2.5.
OLDEST = (2, 6)
# Tried in this order.
PAGE_MULTIPLES = (16, 64, 128, 256)


class FlashUnavailableError(Exception):
    """flash-attn cannot be used here; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Which rows of a call belong to whom: all int32 on the device but the two numbers."""

    query_starts: Tensor  # [S + 1]
    key_starts: Tensor  # [S + 1]
    context_lens: Tensor  # [S]
    max_query_len: int
    max_context_len: int


@dataclass(frozen=True, kw_only=True)
class FlashLibrary:
    """One importable flash-attn. `page_multiple` 0: it takes no block tables."""

    name: str
    page_multiple: int
    _varlen: Callable[..., Any]
    _with_cache: Callable[..., Any] | None = None

    def takes_pages(self, block_size: int) -> bool:
        """Whether blocks of this size can be read where they lie."""
        return self.page_multiple > 0 and block_size % self.page_multiple == 0

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, span: Span, **options: Any) -> Tensor:
        """q [T, H, D] over keys and values [U, K, D] of the spans -> [T, H, D]."""
        return _first(
            self._varlen(
                q=q,
                k=keys,
                v=values,
                cu_seqlens_q=span.query_starts,
                cu_seqlens_k=span.key_starts,
                max_seqlen_q=span.max_query_len,
                max_seqlen_k=span.max_context_len,
                causal=True,
                **options,
            )
        )

    def attend_pages(
        self, q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, span: Span, **options: Any
    ) -> Tensor:
        """q [T, H, D] over pages [N, P, K, D] (any strides, D side by side) named by tables [S, C] int32 ->
        [T, H, D]. One split, so that a row depends on its own history alone.
        """
        if self._with_cache is not None:
            return _first(
                self._with_cache(
                    q=q,
                    k_cache=keys,
                    v_cache=values,
                    cache_seqlens=span.context_lens,
                    page_table=tables,
                    cu_seqlens_q=span.query_starts,
                    max_seqlen_q=span.max_query_len,
                    causal=True,
                    num_splits=1,
                    **options,
                )
            )
        return self.attend(q, keys, values, span, block_table=tables, **options)


def find_library(device: torch.device, capability: tuple[int, int]) -> FlashLibrary:
    """The newest that suits a device of this compute capability. Raises FlashUnavailableError."""
    if capability < (8, 0):
        raise FlashUnavailableError(f"flash-attn needs compute capability 8.0, this is {capability}")
    reasons = []
    if capability[0] == 9:
        try:
            module = import_module("flash_attn_interface")
            return FlashLibrary(
                name="flash-attn 3",
                page_multiple=1,
                _varlen=module.flash_attn_varlen_func,
                _with_cache=module.flash_attn_with_kvcache,
            )
        except (ImportError, OSError, AttributeError) as error:
            reasons.append(f"version 3: {error}")
    try:
        module = import_module("flash_attn")
        version = str(module.__version__)
        if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
            raise ImportError(f"{version} is older than {'.'.join(map(str, OLDEST))}")
        library = FlashLibrary(
            name=f"flash-attn {version}", page_multiple=0, _varlen=module.flash_attn_varlen_func
        )
    except (ImportError, OSError, AttributeError, ValueError) as error:
        raise FlashUnavailableError("; ".join([*reasons, f"version 2: {error}"])) from error
    multiple = next((size for size in PAGE_MULTIPLES if _takes(library, size, device)), 0)
    return FlashLibrary(name=library.name, page_multiple=multiple, _varlen=library._varlen)


def _takes(library: FlashLibrary, page: int, device: torch.device) -> bool:
    """Whether a call with pages of this size goes through."""

    def whole(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    q = torch.zeros(2, 1, 64, dtype=torch.float16, device=device)
    pages = torch.zeros(1, page, 1, 64, dtype=torch.float16, device=device)
    span = Span(
        query_starts=whole(0, 2),
        key_starts=whole(0, 2),
        context_lens=whole(2),
        max_query_len=2,
        max_context_len=2,
    )
    try:
        library.attend(q, pages, pages, span, block_table=whole(0)[None], softmax_scale=1.0)
    except (RuntimeError, TypeError):
        return False
    return True


def _first(result: Any) -> Tensor:
    """Some releases return the normalizers, too."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
