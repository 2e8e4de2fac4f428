"""Gemma 4 (text): layers that slide and layers that see everything have heads of two sizes, the last layers
read keys and values of earlier ones, and each layer may read an embedding of its own or have experts beside
its feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import activation, attention_biases, decoder_spec, family, windows_of
from engine.model.layer_spec import LayerHeads, PerLayerSpec
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, TensorNames

# Settings of one layer that are known here.
_OWN = frozenset({"head_dim", "num_key_value_heads"})


@family("Gemma4ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """What belongs to images and sound alone is not looked at."""
    if config.values.get("use_bidirectional_attention") != "vision":
        config.require("use_bidirectional_attention", None, None)
    num_layers = config.count("num_hidden_layers")
    # Whatever is said, the last layer sees everything.
    types = config.layer_types(num_layers) or ("sliding_attention",) * num_layers
    slides = [types[layer] == "sliding_attention" for layer in range(num_layers - 1)]
    if "layer_types" not in config.values:
        slides = [(layer + 1) % 6 != 0 for layer in range(num_layers - 1)]
    slides.append(False)
    windows = windows_of(
        config.without("layer_types"), default=slides, window=config.count("sliding_window", 512)
    )
    sources = shared_sources(config, slides)
    heads = _heads(config, slides, sources)
    size = config.count("intermediate_size", 9216)
    sizes = tuple(
        2 * size if source is not None and config.flag("use_double_wide_mlp", False) else size
        for source in sources
    )
    by_kind = {slide: each.head_dim for slide, each in zip(slides, heads, strict=True)}
    width = config.integer("hidden_size_per_layer_input", 256)
    return decoder_spec(
        config,
        **attention_biases(config),
        **gemma_basics(config),
        num_kv_heads=max(each.num_kv_heads for each in heads),
        head_dim=max(each.head_dim for each in heads),
        layer_heads=heads,
        intermediate_size=size,
        intermediate_sizes=sizes,
        windows=windows,
        ropes=(
            _rope(config, "full_attention", by_kind[False]),
            _rope(config, "sliding_attention", by_kind.get(True, by_kind[False])),
        ),
        rope_of_layer=tuple(map(int, slides)),
        layer_scalars=True,
        per_layer=per_layer_inputs(config, width) if width else None,
        experts=_experts(config),
        names=TensorNames(skipped=unused_keys(sources)),
    )


@family("Gemma4UnifiedForCausalLM")
def read_unified(config: ConfigReader) -> ModelSpec:
    """Without encoders of images and sound, and in its text a second embedding or experts."""
    given = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
    defaults = {"sliding_window": 1024, "use_bidirectional_attention": "vision"}
    return read(ConfigReader({**defaults, **config.values, **given}, config.source))


def gemma_basics(config: ConfigReader) -> dict[str, Any]:
    """What Gemma 3n and 4 have in common."""
    return {
        "attention_scale": 1.0,
        "activation": activation(config, "hidden_activation", "gelu_pytorch_tanh"),
        "norm_placement": "sandwich",
        "qk_norm": "head",
        "value_norm": True,
        "embedding_scale": config.count("hidden_size") ** 0.5,
        "rounds_embedding_scale": True,
        "tied_embeddings": config.flag("tie_word_embeddings", True),
        "logit_soft_cap": config.optional_number("final_logit_softcapping"),
    }


def per_layer_inputs(config: ConfigReader, width: int) -> PerLayerSpec:
    """The second embedding."""
    rows = config.count("vocab_size_per_layer_input", 262_144)
    return PerLayerSpec(num_embeddings=rows, width=width)


def shared_sources(config: ConfigReader, slides: list[bool], *, default: int = 0) -> tuple[int | None, ...]:
    """For each layer the one whose keys and values it reads: `num_kv_shared_layers` at the end read those of
    the last layer before them that slides as they do.
    """
    count, own = config.integer("num_kv_shared_layers", default), len(slides)
    first = own - count
    if not count:
        return (None,) * own
    last = {slides[layer]: layer for layer in range(max(0, first))}
    if set(last) != set(slides):
        raise CheckpointError(
            f"{config.source}: num_kv_shared_layers = {count} leaves no layer of each kind in layer_types "
            "whose keys and values the others could read"
        )
    return tuple(None if layer < first else last[slides[layer]] for layer in range(own))


def unused_keys(sources: tuple[int | None, ...]) -> str:
    """Pattern of names of what layers need no more that read another one's keys and values."""
    reading = "|".join(str(layer) for layer, source in enumerate(sources) if source is not None)
    return rf"(.*\.)?layers\.({reading})\.self_attn\.[kv]_(proj|norm)\." if reading else ""


def _heads(
    config: ConfigReader, slides: list[bool], sources: tuple[int | None, ...]
) -> tuple[LayerHeads, ...]:
    """Attention of each layer, by kind or as `per_layer_config` has it."""
    same = config.flag("attention_k_eq_v", False)
    dims = {True: config.count("head_dim", 256), False: config.count("global_head_dim", 512)}
    counts = dict.fromkeys((True, False), config.count("num_key_value_heads", 4))
    if same and config.values.get("num_global_key_value_heads") is not None:
        counts[False] = config.count("num_global_key_value_heads")
    given = config.values.get("per_layer_config")
    if given is not None:
        # Whoever wrote it said there all that differs from layer to layer.
        dims[False], counts[False] = dims[True], counts[True]
    num_heads, found = config.count("num_attention_heads", 8), list[LayerHeads]()
    for layer, (slide, source) in enumerate(zip(slides, sources, strict=True)):
        own = _own(config, given, layer)
        number = own.count("num_key_value_heads", counts[slide])
        if num_heads % number:
            raise CheckpointError(
                f"{config.source}: num_attention_heads = {num_heads} is not a multiple of the {number} kv "
                f"heads of layer {layer}"
            )
        found.append(
            LayerHeads(
                num_kv_heads=number if source is None else found[source].num_kv_heads,
                head_dim=(dim := own.count("head_dim", dims[slide])),
                value_dim=dim,
                num_heads=num_heads,
                values_of_keys=same and not slide,
                cache_of=source,
            )
        )
    for slide in set(slides):
        sizes = {each.head_dim for each, slid in zip(found, slides, strict=True) if slid == slide}
        if len(sizes) > 1:
            raise CheckpointError(
                f"{config.source}: per_layer_config gives layers of one kind heads of {sorted(sizes)} "
                "elements, which would need rotations of their own and is not supported"
            )
    return tuple(found)


def _own(config: ConfigReader, given: Any, layer: int) -> ConfigReader:
    """What `per_layer_config` says of a layer."""
    name = f"{config.source}: per_layer_config"
    if given is not None and not isinstance(given, Mapping):
        raise CheckpointError(f"{name} = {given!r} is not a table of layers")
    own = (given or {}).get(str(layer), {})
    if not isinstance(own, Mapping):
        raise CheckpointError(f"{name}.{layer} = {own!r} is not a table of keys")
    unknown = sorted(set(own) - _OWN)
    if unknown:
        raise CheckpointError(f"{name}.{layer}.{unknown[0]} is not supported, only {', '.join(sorted(_OWN))}")
    return ConfigReader(own, f"{name}.{layer}")


def _rope(config: ConfigReader, kind: str, head_dim: int) -> Any:
    """The rotation of one kind of layer; those that see everything turn a quarter of a head unless said."""
    if config.values.get("rope_parameters") is None:
        given = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0}
        given = given if kind == "full_attention" else {"rope_type": "default", "rope_theta": 10_000.0}
        config = ConfigReader({**config.values, "rope_parameters": {kind: given}}, config.source)
    return config.rope(head_dim, layer_type=kind)


def _experts(config: ConfigReader) -> ExpertSpec | None:
    if not config.flag("enable_moe_block", False):
        return None
    return ExpertSpec(
        num_experts=config.count("num_experts"),
        num_active=config.count("top_k_experts"),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        layout="fused" if config.text("experts_layout", "stacked") == "fused" else "stacked",
        joins_dense=True,
    )
