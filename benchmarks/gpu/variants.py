"""Launches of every kernel as real models make them, on torch's "meta" device, for `compile_ahead`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.activation.triton_activation import KINDS, gate
from kernels.adapters.reference import TorchChanges
from kernels.adapters.triton_adapters import TritonAdapterStep
from kernels.attention.ragged import AttentionOptions, DecodeBatch, RaggedBatch
from kernels.attention.triton_attention import CapturedPlan, TritonAttention
from kernels.experts.routing import Routing
from kernels.experts.triton_experts import combine, route
from kernels.linear.formats import (
    FP8_BLOCK,
    DenseWeight,
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    WeightFormat,
)
from kernels.linear.triton_backend import InvariantLinear, TritonLinear
from kernels.linear.triton_rows import GroupedRows
from kernels.linear.triton_scaled import quantize_rows
from kernels.norm.triton_norm import rms_norm
from kernels.paged_cache.channel_cache import ChannelCache, begin_step
from kernels.paged_cache.store import LayerCache, allocate_layer
from kernels.paged_cache.triton_blocks import move_blocks
from kernels.recurrent.backends import RgLruWeights, ScanInputs, ScanWeights, SelectiveInputs
from kernels.recurrent.rows import StateRows
from kernels.recurrent.triton_recurrent import TritonRecurrent
from kernels.rope.triton_rope import rope_and_store
from kernels.sampling.triton_sampling import compile_draw

# Inputs of products, and of adapters beside them.
INPUTS = 4096
# Rows for tiles of few, some and many; the last compute all parts of K in one program.
ROWS = (5, 100, 1000)


def _activation() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every gate over bfloat16, and what has none."""
    x = torch.empty(2, 2 * 14336, dtype=torch.bfloat16, device="meta")
    coefficients = torch.empty(4, device="meta")
    for name in KINDS:
        yield f"gate {name}", partial(gate, name, x, coefficients=coefficients)
        yield f"plain {name}", partial(gate, name, x, plain=True, coefficients=coefficients)


SIZES, SLOTS = (4096, 1024, 1024), 8


def _adapters() -> Iterator[tuple[str, Callable[[], object]]]:
    """q, k and v together, of the smallest and the largest rank."""
    meta = torch.device("meta")
    for dtype in (torch.bfloat16, torch.float32):
        for rank in (16, 64):
            changes = TorchChanges(
                INPUTS,
                SIZES,
                num_slots=SLOTS,
                max_rank=rank,
                dtype=dtype,
                device=meta,
            )
            for rows in ROWS:
                name = f"adapters of rank {rank}, {str(dtype).removeprefix('torch.')}, {rows} rows"
                yield name, partial(_add_changes, changes, rows)


def _add_changes(changes: TorchChanges, rows: int) -> None:
    make = partial(torch.empty, dtype=changes.down.dtype, device=changes.down.device)
    step = TritonAdapterStep(torch.zeros(rows, dtype=torch.int64, device="meta"), SLOTS)
    step.add(changes, make(rows, INPUTS), make(rows, sum(SIZES)))


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
TYPES: tuple[tuple[torch.dtype, Any], ...] = (
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.int8),
    (torch.bfloat16, torch.float8_e4m3fn),
    (torch.bfloat16, "kivi4"),
    (torch.float32, torch.float32),
)


def _attention(arch: str) -> Iterator[tuple[str, Callable[[], object]]]:
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
            by_channel = stored == "kivi4"
            if by_channel and not value_dim:
                # Refused at start.
                continue
            if by_channel and block_size < 64 and arch == "sm_90":
                # It has blocks of 64 alone.
                continue
            places = 64 if by_channel else block_size
            cache = allocate_layer(
                num_blocks=600,
                block_size=places,
                num_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                shared_value_dim=key_dim - 64,
                dtype=stored,
                device=META,
            )
            types = f"{str(kind).removeprefix('torch.')} over {cache.type_name}, blocks of {places}"
            q = torch.empty(302, heads, key_dim, dtype=kind, device=META)
            begun = _begin(cache, _ragged(places))
            yield (
                f"eager {name}, {types}",
                partial(attention.run, attention.plan(begun, META), q, cache, options, sinks),
            )
            yield (
                f"captured {name}, {types}",
                partial(attention.run, _captured(attention, places), q[:2], cache, options, sinks),
            )


def _begin(cache: LayerCache, batch: RaggedBatch) -> RaggedBatch:
    """The step as attention plans it, in which a cache has whole keys where it rounds them by channel."""
    if not isinstance(cache, ChannelCache):
        return batch
    cache.keep_newest_keys(4)
    rows = torch.empty(int(batch.query_starts[-1]), dtype=torch.int64, device=META)
    return begin_step([cache], batch, 2 * np.arange(batch.context_lens.size), rows)


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


def _experts() -> Iterator[tuple[str, Callable[[], object]]]:
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


OUTPUTS, EXPERTS, GROUP = 6144, 8, 128


def _linear() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every format of weight, for layers and for experts; rounding."""
    linear, rows = TritonLinear(), _tensor(2, 14336)
    for name, weight in _weights().items():
        product = linear.pack(weight)
        for count in ROWS:
            yield f"{name}, {count} rows", partial(product, _tensor(count, INPUTS))
        for count in (5, 1000):
            yield f"{name} experts, {count} rows", partial(_expert_product, [weight] * EXPERTS, count)
    dense = DenseWeight(values=_tensor(OUTPUTS, INPUTS))
    for count in ROWS:
        yield (
            f"experts, {count} rows each",
            partial(_expert_product, [dense] * EXPERTS, count * EXPERTS),
        )
    yield "rows to int8", partial(quantize_rows, rows, "int8", factors=_tensor(14336, kind=torch.float32))
    yield "rows to fp8", partial(quantize_rows, rows, "fp8")
    for kind in (torch.bfloat16, torch.float32):
        invariant = InvariantLinear().pack(_tensor(OUTPUTS, INPUTS, kind=kind))
        x = _tensor(5, INPUTS, kind=kind)
        yield f"invariant {str(kind).removeprefix('torch.')}", partial(invariant, x)


def _weights() -> dict[str, WeightFormat]:
    bytes_ = _tensor(OUTPUTS, INPUTS, kind=torch.int8)
    groups, halves = (_tensor(OUTPUTS, INPUTS // size, kind=torch.float32) for size in (GROUP, GROUP // 2))
    blocks = _tensor(OUTPUTS // FP8_BLOCK, INPUTS // FP8_BLOCK, kind=torch.float32)
    packed, fp8 = bytes_[:, ::2].view(torch.uint8).contiguous(), bytes_.view(torch.float8_e4m3fn)
    return {
        "W4A16": Int4Weight(packed=packed, scale=groups),
        "W4A16 by 64 with minima": Int4Weight(packed=packed, scale=halves, minimum=halves),
        "W8A16": Int8Weight(values=bytes_, scale=groups),
        "W8A8": Int8Weight(values=bytes_, scale=groups[:, :1], activations="int8"),
        "fp8": Fp8Weight(values=fp8, scale=groups[:, 0].contiguous()),
        "fp8 128x128": Fp8Weight(values=fp8, scale=blocks),
    }


def _expert_product(weights: Sequence[WeightFormat], rows: int) -> Tensor:
    """Gate and up of as many rows."""
    experts = TritonLinear().grouped(weights)
    assert experts is not None, "of one format"
    x, choice = _tensor(rows, INPUTS), _tensor(rows, kind=torch.int32)
    return experts(x, experts.group(choice), rows_per_input=1, gate="silu")


def _tensor(*shape: int, kind: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=kind, device="meta")


def _norm() -> Iterator[tuple[str, Callable[[], object]]]:
    """The residual stream of a layer, kept and rounded."""
    x = torch.empty(2, 4096, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(4096, device="meta")
    yield "norm 4096", partial(rms_norm, x, weight, 1e-5, x)
    yield "norm 4096 to int8", partial(rms_norm, x, weight, 1e-5, x, "int8", weight)
    yield "norm 4096 to fp8", partial(rms_norm, x, weight, 1e-5, x, "fp8")
    yield "layer norm 4096", partial(rms_norm, x, weight, 1e-5, x, bias=weight, centered=True)


def _paged_cache() -> Iterator[tuple[str, Callable[[], object]]]:
    """Out of the cache, and into it."""
    numbers = torch.empty(64, dtype=torch.int64, device="meta")
    rows = torch.empty(64, 1 << 16, dtype=torch.int32, device="meta")
    for name, out in (("out", True), ("in", False)):
        yield (
            f"blocks {name}",
            partial(move_blocks, numbers, numbers, numbers, numbers, rows, largest=1 << 14, out=out),
        )


# Name, heads of values and of keys, sizes of a key and of a value, channels of the convolution.
RECURRENCES = (
    ("delta rule, Qwen3-Next", 32, 16, 128, 128, 8192),
    ("delta rule by channel, Kimi Linear", 32, 32, 128, 128, 12288),
    ("Mamba 2, Granite 4", 128, 1, 128, 64, 8448),
)


def _recurrent() -> Iterator[tuple[str, Callable[[], object]]]:
    """Convolution, scan and norm of two sequences, of which one leaves a copy."""
    backend, rows = TritonRecurrent(), 302
    states = StateRows.of(np.arange(2), np.array([7, 0]), np.array([0, 1, rows]), [(), ((160, 3),)])
    step = backend.place(states, np.array([0, 1, rows]), np.array([8, rows - 1]), rows, META)
    make = partial(torch.empty, device=META)
    for name, heads, groups, keys, values, channels in RECURRENCES:
        is_delta, by_channel = name.startswith("delta"), "channel" in name
        mixed, gate = make(rows, channels), make(rows, heads * values)
        inputs = ScanInputs(
            queries=mixed[:, : groups * keys].view(rows, groups, keys),
            keys=mixed[:, : groups * keys].view(rows, groups, keys),
            values=mixed[:, : heads * values].view(rows, heads, values),
            decays=gate[:, : heads * keys].view(rows, heads, keys) if by_channel else gate[:, :heads],
            gains=gate[:, heads : 2 * heads] if is_delta else None,
        )
        shift = make(heads, keys) if by_channel else make(heads)
        weights = ScanWeights(rate=make(heads), bias=shift, skip=None if is_delta else make(heads))
        convolve = partial(backend.short_convolution, activates=True)
        bias = None if is_delta else make(channels)
        yield (
            f"convolution, {name}",
            partial(convolve, mixed, make(4, channels), bias, make(4, 3, channels), step),
        )
        yield f"scan, {name}", partial(backend.scan, inputs, weights, make(4, heads, keys, values), step)
        size = values if is_delta else heads * values
        norm = partial(backend.gated_norm, gate, gate, make(size), 1e-6)
        yield f"gated norm, {name}", partial(norm, size=size, gate_first=not is_delta, kind="silu")
    # RecurrentGemma 2B.
    heads, size = 10, 256
    x, gates = make(rows, heads * size), make(rows, heads, 2 * size)
    known = RgLruWeights(bias=make(heads, 2 * size), rate=make(heads * size))
    yield "recurrent units", partial(backend.rg_lru, x, gates, known, make(4, heads, 1, size), step)
    gated = partial(backend.gated_norm, x, x, None, 0.0, size=heads * size, gate_first=False)
    yield "gate, recurrent units", partial(gated, kind="gelu_tanh")
    # Jamba Reasoning 3B.
    keys, channels = 16, 5120
    sizes = (channels, channels, keys, keys)
    selected = SelectiveInputs(*(make(rows, size) for size in sizes))
    scan = partial(backend.selective_scan, selected, make(keys, channels), make(channels))
    yield "selective scan", partial(scan, make(4, 1, keys, channels), step)


ROWS_OF_TWO: dict[str, Any] = {
    "query_starts": np.arange(3),
    "context_lens": np.array([64, 65]),
    "block_tables": np.zeros((2, 2), np.int64),
    "block_size": 64,
}


def _rope() -> Iterator[tuple[str, Callable[[], object]]]:
    """Llama's heads over every type of cache."""
    device = torch.device("meta")
    fused = torch.empty(2, 48, 128, dtype=torch.bfloat16, device=device)
    q, k, v = torch.split(fused, [32, 8, 8], dim=1)
    angles = torch.empty(2, 64, device=device)
    slots = torch.empty(2, dtype=torch.int64, device=device)
    for kind in dict.fromkeys(stored for kind, stored in TYPES if kind == torch.bfloat16):
        cache = allocate_layer(
            num_blocks=1,
            block_size=64 if kind == "kivi4" else 16,
            num_heads=8,
            key_dim=128,
            value_dim=128,
            shared_value_dim=0,
            dtype=kind,
            device=device,
        )
        # Two rows, each of which may fill a block.
        _begin(cache, RaggedBatch(**ROWS_OF_TWO))
        name = f"rope and store, {str(kind).removeprefix('torch.')}"
        yield name, partial(rope_and_store, q, k, v, angles, angles, slots, cache)


def _sampling() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every combination of options over Llama's vocabulary."""
    yield "draw", partial(compile_draw, 128_256, torch.device("meta"))


def variants(arch: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names, and what launches kernels in the shapes of real models, as on an architecture."""
    others = (_activation, _adapters, _experts, _linear, _norm, _paged_cache, _recurrent, _rope, _sampling)
    return chain(_attention(f"sm_{arch}"), *(operation() for operation in others))
