"""Attention as real models launch it: what compile_ahead compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.triton_attention import CapturedPlan, TritonAttention
from kernels.paged_cache import allocate_layer

META = torch.device("meta")
PLAIN = AttentionOptions(scale=0.1)
WINDOW = AttentionOptions(scale=0.1, window=128)
GEMMA = AttentionOptions(scale=0.1, window=4096, soft_cap=50.0)
# Name, query heads, kv heads, size of a key and of a value (0: inside the key), options, sinks.
MODELS = (
    ("llama", 32, 8, 128, 128, PLAIN, False),
    ("gemma", 16, 8, 256, 256, GEMMA, False),
    ("gpt-oss", 64, 8, 64, 64, WINDOW, True),
    ("deepseek", 128, 1, 576, 0, PLAIN, False),
)
# Query's type, cache's type.
TYPES = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.float32, torch.float32),
)


def variants(arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Prompts beside decode rows, and captured decode rows, of every model over every type; on Hopper also
    over blocks that its copy engine fetches whole.
    """
    for block_size in (16, 64) if arch == "sm_90" else (16,):
        yield from _of_blocks(arch, block_size)


def _of_blocks(arch: str, block_size: int) -> Iterator[tuple[str, Callable[[], object]]]:
    for name, heads, kv_heads, key_dim, value_dim, options, with_sinks in MODELS:
        attention = TritonAttention(num_heads=heads, num_kv_heads=kv_heads, arch=arch)
        sinks = torch.empty(heads, device=META) if with_sinks else None
        for kind, stored in TYPES:
            cache = allocate_layer(
                num_blocks=600,
                block_size=block_size,
                num_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                shared_value_dim=key_dim - 64,
                dtype=stored,
                device=META,
            )
            types = f"{str(kind).removeprefix('torch.')} over {cache.type_name}, blocks of {block_size}"
            q = torch.empty(302, heads, key_dim, dtype=kind, device=META)
            yield (
                f"eager {name}, {types}",
                partial(attention.run, attention.plan(_ragged(block_size), META), q, cache, options, sinks),
            )
            yield (
                f"captured {name}, {types}",
                partial(attention.run, _captured(attention, block_size), q[:2], cache, options, sinks),
            )


def _ragged(block_size: int) -> RaggedBatch:
    """A prompt beside two decode rows."""
    return RaggedBatch(
        query_starts=np.array([0, 1, 2, 302]),
        context_lens=np.array([700, 600, 300]),
        block_tables=np.arange(3 * 44).reshape(3, 44),
        block_size=block_size,
    )


def _captured(attention: TritonAttention, block_size: int) -> CapturedPlan:
    """Two decode rows."""
    return attention.plan_decode(
        DecodeBatch(
            context_lens=torch.empty(2, dtype=torch.int32, device=META),
            block_tables=torch.empty(2, 512, dtype=torch.int32, device=META),
            block_size=block_size,
            max_context_len=8192,
        )
    )
