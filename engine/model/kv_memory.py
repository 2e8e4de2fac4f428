"""What keys and values are held as, layer by layer, and how many bytes they take. No torch.

Four bits cost some layers more than others (KVTuner, arXiv 2502.04420), so `engine.cache.kv_dtype_layers`
gives layers by number another type than `engine.cache.kv_dtype`. In SmolLM2 no few bear most of it: eight
bits for the worst four of 30 layers spare a third of the rise in perplexity (`benchmarks.kv_layers`). The
plan, the cache (runner/kv_storage) and the fingerprint of blocks that engines exchange
(runner/prefix_disk/build) take the choice from here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import msgspec

from engine.config import CacheConfig, EngineConfig
from engine.model.spec import ModelSpec
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP, SCALED
from runtime.errors import ConfigError

# Bits of an element; those that are SCALED have one float32 scale beside each key, value and head.
KV_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8, BY_CHANNEL: 4}
# What keys by channel are: their numbers, in a block, are then whole bytes a token.
CHANNELS_GROUP = 16
_KEY = "engine.cache.kv_dtype_layers"
_LAYERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")

# One type for all layers of a model, or that of each.
KvDtypes = str | Sequence[str]


class KvShare(msgspec.Struct, frozen=True, kw_only=True):
    """What the layers of one type take of a token's bytes."""

    kv_dtype: str
    # "0-1, 29".
    layers: str
    bytes_per_token: int


def by_layer(kv_dtypes: KvDtypes, num_layers: int) -> Sequence[str]:
    """The type of each layer."""
    return (kv_dtypes,) * num_layers if isinstance(kv_dtypes, str) else kv_dtypes


def kv_bytes_per_token(spec: ModelSpec, kv_dtypes: KvDtypes, layers: Iterable[int] | None = None) -> int:
    """Bytes that one token's keys and values take, over all layers (or those) that store some. Quantized ones
    add two scales per head; those by channel one, and two numbers for each channel of a block.
    """
    types, total = by_layer(kv_dtypes, spec.num_layers), 0
    for layer in range(spec.num_layers) if layers is None else layers:
        shape, kv_dtype = spec.cache_shape(layer), types[layer]
        if shape is not None:
            total += shape.elements * KV_BITS[kv_dtype] // 8
            total += 8 * shape.num_heads if kv_dtype in SCALED else 0
            if kv_dtype == BY_CHANNEL:
                total += shape.num_heads * (4 + 4 * shape.key_dim // KEY_GROUP)
    return total


def recent_bytes(spec: ModelSpec, kv_dtypes: KvDtypes, num_sequences: int) -> int:
    """What the newest keys of so many sequences take that are whole: two blocks of each in bfloat16, in the
    layers that round keys by channel.
    """
    types = by_layer(kv_dtypes, spec.num_layers)
    shapes = [spec.cache_shape(layer) for layer in range(spec.num_layers) if types[layer] == BY_CHANNEL]
    elements = sum(shape.num_heads * shape.key_dim for shape in shapes if shape is not None)
    return num_sequences * 2 * KEY_GROUP * 2 * elements


def own_key_bytes(spec: ModelSpec, kv_dtypes: KvDtypes, num_tokens: int) -> int:
    """What a step of so many tokens keeps of layers whose keys, rounded by channel, later ones read: what was
    projected there, in float32.
    """
    types = by_layer(kv_dtypes, spec.num_layers)
    sources = {each: spec.cache_source(each) for each in spec.attending}
    again = {source for layer, source in sources.items() if source != layer and types[source] == BY_CHANNEL}
    heads = [(spec.heads_of(layer), spec.cache_shape(layer)) for layer in again]
    width = sum(each.num_heads * shape.key_dim + shape.elements for each, shape in heads if shape is not None)
    return num_tokens * width * 4


def piece_bytes(spec: ModelSpec, kv_dtypes: KvDtypes, num_tokens: int) -> int:
    """What torch keeps of the keys of such a step that are whole, in bfloat16: layers that round them by
    channel share it one after another.
    """
    types = by_layer(kv_dtypes, spec.num_layers)
    shapes = [spec.cache_shape(layer) for layer in range(spec.num_layers) if types[layer] == BY_CHANNEL]
    widths = (shape.num_heads * shape.key_dim for shape in shapes if shape is not None)
    return num_tokens * 2 * max(widths, default=0)


def num_slots(config: EngineConfig) -> int:
    """Sequences whose newest keys there is room for, by their slots of the runner's table, of which lower
    ones serve first. What is not written takes no memory.
    """
    return 2 * config.scheduler.max_num_seqs


def num_texts_of(config: EngineConfig, device: str) -> int:
    """Those whose newest keys take memory: on a CPU what is written, elsewhere all slots, and one for rows
    that pad a step.
    """
    return config.scheduler.max_num_seqs if device == "cpu" else num_slots(config) + 1


def kv_shares(spec: ModelSpec, kv_dtypes: Sequence[str], first_layer: int = 0) -> list[KvShare]:
    """The types in use, each with its layers, which count from `first_layer`, and their bytes."""
    stored = [layer for layer in range(spec.num_layers) if spec.cache_shape(layer) is not None]
    shares = []
    for kv_dtype in dict.fromkeys(kv_dtypes[layer] for layer in stored):
        layers = [layer for layer in stored if kv_dtypes[layer] == kv_dtype]
        taken = kv_bytes_per_token(spec, kv_dtypes, layers)
        runs = _runs(first_layer + layer for layer in layers)
        shares.append(KvShare(kv_dtype=kv_dtype, layers=", ".join(runs), bytes_per_token=taken))
    return shares


def _runs(layers: Iterable[int]) -> Iterator[str]:
    """Ascending numbers, as they are configured."""
    for _, pairs in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        run = [layer for _, layer in pairs]
        yield str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def chosen_kv_dtypes(cache: CacheConfig, num_layers: int, dtype: str) -> tuple[str, ...]:
    """The type of each layer of a model that is served in `dtype`. Raises ConfigError for layers that are
    none, or named twice.
    """
    return _chosen(cache, _choices(cache, num_layers), num_layers, dtype)


_Choice = tuple[str, range, str]


def _chosen(cache: CacheConfig, choices: Iterable[_Choice], num_layers: int, dtype: str) -> tuple[str, ...]:
    found: list[str] = [cache.kv_dtype] * num_layers
    for _, layers, kv_dtype in choices:
        found[layers.start : layers.stop] = [kv_dtype] * len(layers)
    return tuple(dtype if each == "auto" else each for each in found)


def _choices(cache: CacheConfig, num_layers: int) -> Iterator[_Choice]:
    """Each entry: as it is written, the layers that it means, and their type."""
    taken: dict[int, str] = {}
    for text, kv_dtype in cache.kv_dtype_layers.items():
        match = _LAYERS.fullmatch(text)
        layers = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not layers:
            raise ConfigError(f'{_KEY}: {text!r} is no layer; write one as "29", and several as "0-1"')
        if layers[-1] >= num_layers:
            raise ConfigError(
                f"{_KEY}: {text!r}: the model has layers 0 to {num_layers - 1}; name some of these"
            )
        for layer in layers:
            if layer in taken:
                raise ConfigError(
                    f"{_KEY}: {taken[layer]!r} and {text!r} both name layer {layer}; leave it to one of them"
                )
            taken[layer] = text
        yield text, layers, kv_dtype


def kv_dtypes_of(spec: ModelSpec, cache: CacheConfig, dtype: str) -> tuple[str, ...]:
    """The same, of a model. Raises ConfigError for what its layers do not hold as well."""
    choices, others = list(_choices(cache, spec.num_layers)), set(range(spec.num_layers))
    for text, layers, kv_dtype in choices:
        for layer in layers:
            if refusal := _why_no_choice(spec, layer):
                raise ConfigError(f"{_KEY}: {text!r}: layer {layer} of {spec.architecture} {refusal}")
        others.difference_update(layers)
        _check(spec, kv_dtype, layers, f"{_KEY}: {text!r}")
    check_kv_dtype(spec, cache.kv_dtype, others)
    return _chosen(cache, choices, spec.num_layers, dtype)


def _why_no_choice(spec: ModelSpec, layer: int) -> str:
    """Why a layer has no type of its own; empty where it has one."""
    if layer not in spec.attending:
        return "keeps no keys and values; leave it out"
    source = spec.cache_source(layer)
    return "" if source == layer else f"reads the keys and values of layer {source}; name that one"


def check_kv_dtype(spec: ModelSpec, kv_dtype: str, layers: Iterable[int] | None = None) -> None:
    """Raises ConfigError for keys and values, of all layers or those, that a type does not hold."""
    _check(spec, kv_dtype, range(spec.num_layers) if layers is None else layers, "engine.cache.kv_dtype")


def _check(spec: ModelSpec, kv_dtype: str, layers: Iterable[int], key: str) -> None:
    shapes = [shape for shape in map(spec.cache_shape, layers) if shape is not None]
    if kv_dtype != BY_CHANNEL or not shapes:
        return
    dims = (dim for shape in shapes for dim in (shape.key_dim, shape.value_dim))
    odd = [dim for dim in dims if dim % CHANNELS_GROUP]
    if spec.latent is not None:
        refusal = "whose latent vectors, each key and value of all heads, need eight bits"
    elif odd:
        refusal = f"whose heads of {min(odd)} elements are no multiple of {CHANNELS_GROUP}"
    elif spec.bidirectional:
        refusal = "whose queries look ahead of their own block"
    else:
        return
    raise ConfigError(
        f"{key} = {kv_dtype!r} does not go with {spec.architecture}, {refusal}; set it to int8, fp8 or auto"
    )


def check_channels(config: EngineConfig, kv_dtypes: Sequence[str]) -> None:
    """Raises ConfigError for what does not go with keys that are rounded by channel."""
    if BY_CHANNEL not in kv_dtypes:
        return
    if config.cache.block_size != KEY_GROUP:
        raise ConfigError(
            f"engine.cache.block_size: does not go with keys and values of {BY_CHANNEL}: "
            f"keys share their steps in blocks; set it to {KEY_GROUP}"
        )
    num_drafts = config.speculation.num_draft_tokens
    if config.speculation.method != "off" and num_drafts > KEY_GROUP:
        raise ConfigError(
            f"engine.speculation.num_draft_tokens = {num_drafts}: does not go with keys and values of "
            f"{BY_CHANNEL}: more than {KEY_GROUP} drafts, all refused, would have taken the room of newest "
            f"keys; set it to {KEY_GROUP} at most"
        )


def check_forgotten_bytes(spec: ModelSpec, cache: CacheConfig) -> None:
    """Raises ConfigError for memory that holds no forgotten block."""
    least = forgotten_block_bytes(spec, cache.block_size)
    if 0 < cache.forgotten_bytes < least:
        raise ConfigError(
            f"engine.cache.forgotten_bytes = {cache.forgotten_bytes}: keys of {cache.block_size} "
            f"forgotten tokens take {least}, the least that is of use; give as many times that as answers "
            "with kv.max_lost forget blocks, or 0 to refuse them"
        )


def forgotten_block_bytes(spec: ModelSpec, block_size: int) -> int:
    """What stays of the keys of a forgotten block (engine/runner/forgotten/keys): of each a byte an element
    and a float32, of each channel two, of each head one.
    """
    if spec.latent is not None:
        return 0
    heads = (shape for shape in map(spec.cache_shape, range(spec.num_layers)) if shape is not None)
    return sum(each.num_heads * (block_size * (each.key_dim + 4) + 8 * each.key_dim + 4) for each in heads)


def remembers_because(spec: ModelSpec, *, has_draft: bool = False) -> str:
    """Why answers of a model may forget no blocks; empty where they may."""
    if spec.pooling is not None or spec.bidirectional:
        return "the model answers nothing that could forget"
    if spec.latent is not None:
        return "its latent attention keeps one vector for all heads"
    if spec.state is not None:
        return "layers of it keep a state, of which no part can be forgotten"
    if any(spec.windows) or any(spec.chunks):
        return "layers of it have a window of their own"
    return "a draft model reads the same blocks" if has_draft else ""
