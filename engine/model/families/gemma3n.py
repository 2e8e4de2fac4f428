"""Gemma 3n (text): several streams of which each layer computes one, embeddings of each layer's own, feed-
forwards of which few gates count, and last layers that read keys and values of earlier ones.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, windows_of
from engine.model.families.gemma import local_rope
from engine.model.families.gemma4 import gemma_basics, per_layer_inputs, shared_sources, unused_keys
from engine.model.layer_spec import AltUpSpec, LayerHeads
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

# Layers, from the first on, of which few gates count where nothing is said.
_SPARSE_LAYERS = 10


@family("Gemma3nForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Every fifth layer sees everything; the others slide."""
    config.require("use_bidirectional_attention", False, False)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 256)
    windows = windows_of(
        config,
        default=[(layer + 1) % 5 != 0 for layer in range(num_layers)],
        window=config.count("sliding_window", 512),
    )
    slides = [window is not None for window in windows]
    sources = shared_sources(config, slides, default=15)
    num_heads, num_kv_heads = config.count("num_attention_heads"), config.count("num_key_value_heads", 2)
    sizes = _each(config, "intermediate_size", num_layers, 16_384)
    if any(type(size) is not int or size < 1 for size in sizes):
        raise CheckpointError(f"{config.source}: intermediate_size = {sizes!r} are no sizes")
    width = config.count("hidden_size_per_layer_input", 256)
    cap = (
        config.optional_number("final_logit_softcapping")
        if "final_logit_softcapping" in config.values
        else 30.0
    )
    return decoder_spec(
        config,
        **attention_biases(config),
        **gemma_basics(config) | {"logit_soft_cap": cap},
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layer_heads=tuple(
            LayerHeads(
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                value_dim=head_dim,
                num_heads=num_heads,
                cache_of=source,
            )
            for source in sources
        ),
        intermediate_size=max(sizes),
        intermediate_sizes=sizes,
        gate_cuts=_cuts(config, num_layers),
        windows=windows,
        ropes=(
            config.rope(head_dim, layer_type="full_attention", default_theta=1_000_000.0),
            local_rope(config, head_dim),
        ),
        rope_of_layer=tuple(map(int, slides)),
        per_layer=per_layer_inputs(config, width),
        altup=_altup(config),
        names=TensorNames(skipped=unused_keys(sources)),
    )


def _altup(config: ConfigReader) -> AltUpSpec:
    streams, active = config.count("altup_num_inputs", 4), config.integer("altup_active_idx", 0)
    if not 0 <= active < streams:
        raise CheckpointError(
            f"{config.source}: altup_active_idx = {active} is none of altup_num_inputs = {streams} streams"
        )
    return AltUpSpec(
        num_streams=streams,
        active=active,
        scales_active=config.flag("altup_correct_scale", True),
        laurel_rank=config.count("laurel_rank", 64),
    )


def _cuts(config: ConfigReader, num_layers: int) -> tuple[float | None, ...]:
    """Standard deviations above the mean that leave the share of gates that `activation_sparsity_pattern`
    says; `activation_sparsity_scale` has them as they are.
    """
    scales = config.values.get("activation_sparsity_scale")
    if scales is not None:
        found = _each(config, "activation_sparsity_scale", num_layers, 0.0)
        return tuple(float(scale) if scale > -100 else None for scale in found)
    some = _SPARSE_LAYERS if num_layers > _SPARSE_LAYERS else 0
    default = [0.95] * some + [0.0] * (num_layers - some)
    shares = _each(config, "activation_sparsity_pattern", num_layers, default)
    if any(isinstance(share, bool) or not 0.0 <= share < 1.0 for share in shares):
        raise CheckpointError(
            f"{config.source}: activation_sparsity_pattern = {shares!r} are no shares from 0 to 1"
        )
    return tuple(NormalDist().inv_cdf(share) if share else None for share in shares)


def _each(config: ConfigReader, key: str, num_layers: int, default: Any) -> tuple[Any, ...]:
    """A number for every layer, or one for all."""
    value = config.values.get(key)
    value = default if value is None else value
    values = value if isinstance(value, list) else [value] * num_layers
    if len(values) != num_layers or not all(isinstance(each, int | float) for each in values):
        raise CheckpointError(
            f"{config.source}: {key} must list numbers of {num_layers} layers, got {value!r}"
        )
    return tuple(values)
