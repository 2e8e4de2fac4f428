"""What all families read in the same way from `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.spec import CheckpointError, ModelSpec, RopeSpec, StateSpec

Family = Callable[[ConfigReader], ModelSpec]
FAMILIES: dict[str, Family] = {}
"""Name in `architectures` of config.json to what reads such a checkpoint."""
NORM_EPS_KEY = "rms_norm_eps"
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
}


def family(architecture: str) -> Callable[[Family], Family]:
    """Enters the function below it under the architecture's name."""

    def enter(read: Family) -> Family:
        FAMILIES[architecture] = read
        return read

    return enter


def decoder_spec(config: ConfigReader, *, default_eps: float = 1e-6, **overrides: Any) -> ModelSpec:
    """The spec of a Llama-like decoder: pre-norm, grouped-query attention, gated feed-forward.

    `overrides` replaces or adds fields that the family decides differently; `default_eps` is of its norms.
    """
    num_layers = config.count("num_hidden_layers")
    num_heads = config.count("num_attention_heads")
    num_kv_heads = overrides.get("num_kv_heads") or config.count("num_key_value_heads", num_heads)
    head_dim = overrides.get("head_dim") or head_size(config)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{config.source}: num_attention_heads = {num_heads} is not a multiple of "
            f"num_key_value_heads = {num_kv_heads}"
        )
    fields: dict[str, Any] = {
        "vocab_size": config.count("vocab_size"),
        "num_embeddings": config.count("vocab_size"),
        "hidden_size": config.count("hidden_size"),
        "intermediate_size": overrides.get("intermediate_size") or config.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "norm_eps": norm_eps(config, default_eps),
        "dtype": checkpoint_dtype(config),
        "tied_embeddings": config.flag("tie_word_embeddings", False),
        "activation": overrides.get("activation") or activation(config),
        "rope_of_layer": (0,) * num_layers,
        "windows": (None,) * num_layers,
        "attention_scale": head_dim**-0.5,
    }
    if "ropes" not in overrides:
        fields["ropes"] = (config.rope(head_dim),)
    fields |= overrides
    spec = ModelSpec(**fields, max_positions=fields["ropes"][0].usable_positions)
    _refuse_impossible(config.source, spec)
    return spec


def _refuse_impossible(source: str, spec: ModelSpec) -> None:
    """Sizes that tensors agree with, and that nothing can be computed by."""
    if spec.intermediate_size < 1 and spec.feed_forward_layers != ():
        raise CheckpointError(
            f"{source}: intermediate_size leaves {spec.intermediate_size} elements of a feed-forward"
        )
    least = min((window for window in spec.windows if window is not None), default=1)
    if least < 1:
        raise CheckpointError(
            f"{source}: sliding_window = {least} is no number of tokens; null is a layer that looks at all"
        )
    turned = {rope.rotary_dim for rope in spec.ropes}
    heads = spec.layer_heads or (spec.heads_of(0),)
    part = {"qk_rope_head_dim": spec.latent.rope_dim} if spec.latent else {}
    for name, size in part.items() or [("head_dim", each.head_dim) for each in heads]:
        if size % 2 and size in turned:
            raise CheckpointError(f"{source}: {name} = {size} is odd, and heads turn by pairs of elements")
    experts = spec.experts
    if experts is None or not experts.layers:
        return
    if not 1 <= experts.num_active <= experts.num_experts:
        raise CheckpointError(
            f"{source}: num_experts_per_tok = {experts.num_active} is not a number from 1 to the "
            f"{experts.num_experts} experts that there are"
        )
    groups, smallest = experts.num_groups, 2 if experts.group_score == "two_best" else 1
    if groups > 1 and (experts.num_experts % groups or experts.num_experts // groups < smallest):
        raise CheckpointError(
            f"{source}: n_group = {groups} does not divide {experts.num_experts} experts into groups of "
            f"{smallest} or more"
        )
    if groups and not 1 <= experts.num_active_groups <= groups:
        raise CheckpointError(
            f"{source}: topk_group = {experts.num_active_groups} is not a number from 1 to n_group = {groups}"
        )
    if groups and experts.num_active > (open_ := experts.num_active_groups * (experts.num_experts // groups)):
        raise CheckpointError(
            f"{source}: num_experts_per_tok = {experts.num_active} is more than the {open_} experts of "
            f"topk_group = {experts.num_active_groups} groups"
        )


# Tokens of a context of models that know no positions and declare no length, and the most that may be asked.
UNSTATED_POSITIONS = 1 << 15
REACHABLE_POSITIONS = 1 << 20


def states_alone(config: ConfigReader, state: StateSpec, *, eps: float, **overrides: Any) -> ModelSpec:
    """The spec of a decoder whose layers carry states and have no other half."""
    rope = RopeSpec(rotary_dim=0, max_positions=UNSTATED_POSITIONS, reachable_positions=REACHABLE_POSITIONS)
    # Heads are those of the states, by which ranks divide them.
    heads = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), state.num_heads)
    return decoder_spec(
        ConfigReader({**config.values, **heads, "intermediate_size": 0}, config.source),
        head_dim=1,
        norm_eps=eps,
        activation="silu",
        ropes=(rope,),
        state=state,
        attention_layers=(),
        feed_forward_layers=(),
        **overrides,
    )


def norm_eps(config: ConfigReader, default: float = 1e-6) -> float:
    """What norms add to the mean of squares."""
    return config.number(NORM_EPS_KEY, default)


def attention_biases(config: ConfigReader, *, default: bool = False) -> dict[str, bool]:
    """`attention_bias`, of the projections before attention and after it."""
    bias = config.flag("attention_bias", default)
    return {"qkv_bias": bias, "output_bias": bias}


def activation(config: ConfigReader, key: str = "hidden_act", default: str = "silu") -> str:
    """Name of the gate's activation."""
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        raise CheckpointError(
            f"{config.source}: {key} = {name!r} is not supported, only {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def layer_norms(config: ConfigReader, key: str = "layer_norm_eps", *, bias: bool = True) -> dict[str, Any]:
    """Layer norms between half layers, `key` being what their `eps` goes by."""
    return {"norm": "layer", "norm_bias": bias, "norm_eps": config.number(key, 1e-5)}


def some_rotate(rope: RopeSpec, rotates: Sequence[bool]) -> dict[str, Any]:
    """Layers of which some, or all, do not turn queries and keys."""
    if not any(rotates):
        return {"ropes": (unturned(rope),), "rope_of_layer": (0,) * len(rotates)}
    return {
        "ropes": (rope,) if all(rotates) else (rope, unturned(rope)),
        "rope_of_layer": tuple(0 if turns else 1 for turns in rotates),
    }


def unturned(rope: RopeSpec) -> RopeSpec:
    """Of layers that do not turn queries and keys, in a model whose others do so."""
    return msgspec.structs.replace(rope, kind="default", rotary_dim=0, parameters={})


def standing(rope: RopeSpec) -> RopeSpec:
    """Of latent attention that turns nothing: the pairs of its keys that are turned elsewhere stand still."""
    return msgspec.structs.replace(rope, kind="proportional", parameters={"turning_share": 0.0})


def rotating_layers(config: ConfigReader, num_layers: int) -> tuple[bool, ...]:
    """Which layers turn queries and keys: `no_rope_layers` has ones for them, or every so many do not."""
    listed = config.numbers("no_rope_layers", num_layers)
    every = config.count("no_rope_layer_interval", 4)
    return tuple(map(bool, listed or [(layer + 1) % every for layer in range(num_layers)]))


def mixed_layers(
    config: ConfigReader,
    *,
    default: Sequence[str],
    state: str,
    keys: Sequence[str] = ("layer_types",),
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers that attend, and those with a state, which are called `state`; from the first of the `keys` that
    is there, or else from `default`.
    """
    key = next((key for key in keys if config.values.get(key) is not None), "")
    kinds = config.values[key] if key else list(default)
    if not isinstance(kinds, list) or len(kinds) != len(default):
        raise CheckpointError(f"{config.source}: {key} must list {len(default)} layers, got {kinds!r}")
    attends, states = {"full_attention", "attention"}, {state, "linear_attention", "mamba"}
    unknown = sorted({str(kind) for kind in kinds} - attends - states)
    if unknown:
        raise CheckpointError(f"{config.source}: {key} holds {unknown}, which is not supported")
    return (
        tuple(layer for layer, kind in enumerate(kinds) if kind in attends),
        tuple(layer for layer, kind in enumerate(kinds) if kind in states),
    )


def head_size(config: ConfigReader, default: int | None = None) -> int:
    """`head_dim`, by default a head's share of the hidden size."""
    share = config.count("hidden_size") // config.count("num_attention_heads")
    return config.count("head_dim", default or share)


def checkpoint_dtype(config: ConfigReader) -> str:
    """`dtype` (newer) or `torch_dtype` (older)."""
    return config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")


def windows_of(config: ConfigReader, *, default: list[bool], window: int | None) -> tuple[int | None, ...]:
    """Window of each layer from `layer_types`, or else from `default` (True slides)."""
    types = config.layer_types(len(default))
    slides = [name == "sliding_attention" for name in types] if types else default
    if any(slides) and window is None:
        raise CheckpointError(f"{config.source}: sliding layers need sliding_window")
    return tuple(window if slide else None for slide in slides)


def ropes_by_kind(
    config: ConfigReader,
    head_dim: int,
    windows: Sequence[int | None],
    *,
    thetas: tuple[float, float] = (10_000.0, 10_000.0),
    partials: tuple[float | None, float | None] = (None, None),
) -> dict[str, Any]:
    """A rotation of layers that look at everything, and one of those with a window; both have defaults in
    that order.
    """
    kinds = ("full_attention", "sliding_attention")
    return {
        "ropes": tuple(
            config.rope(head_dim, layer_type=kind, default_theta=theta, default_partial=partial)
            for kind, theta, partial in zip(kinds, thetas, partials, strict=True)
        ),
        "rope_of_layer": tuple(0 if window is None else 1 for window in windows),
    }


def sparse_of(config: ConfigReader, default: Sequence[int]) -> tuple[int, ...]:
    """Layers with experts: those that `mlp_layer_types` calls so, or else the default."""
    kinds, num_layers = config.values.get("mlp_layer_types"), config.count("num_hidden_layers")
    if kinds is None:
        return tuple(default)
    if (
        not isinstance(kinds, list)
        or len(kinds) != num_layers
        or not set(map(str, kinds)) <= {"dense", "sparse"}
    ):
        raise CheckpointError(
            f"{config.source}: mlp_layer_types must name {num_layers} layers dense or sparse, got {kinds!r}"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "sparse")
