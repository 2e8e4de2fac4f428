"""LFM3: LFM2 with norms behind the half layers, a gate for each head, and windows in some layers, whose
rotation is another one.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import NORM_EPS_KEY, decoder_spec, family, ropes_by_kind
from engine.model.families.lfm2 import NAMES, convolutions
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

_SANDWICH = (
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.post_operator_norm\.", ".post_attention_layernorm."),
    (r"\.ffn_norm\.", ".pre_feedforward_layernorm."),
    (r"\.post_ffn_norm\.", ".post_feedforward_layernorm."),
)
_GATE = (r"\.self_attn\.g_proj\.", ".self_attn.gate_proj.")
_ROPES = {
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1_000_000.0,
        "partial_rotary_factor": 0.5,
    },
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}


@family("Lfm3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Half of a head's pairs turn where a layer looks at everything, unless stated."""
    config.require("attention_bias", False, False)
    kinds, head_dim = _kinds(config), config.count("head_dim", 128)
    window = config.count("sliding_window", 256)
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    ropes = config if config.values.get("rope_parameters") else _with(config, rope_parameters=_ROPES)
    is_sandwich = config.flag("use_sandwich_norm", True)
    states = tuple(layer for layer, kind in enumerate(kinds) if kind == "conv")
    return decoder_spec(
        _with(config, **{NORM_EPS_KEY: config.number("norm_eps", 1e-5)}),
        **ropes_by_kind(ropes, head_dim, windows, thetas=(1_000_000.0, 1_000_000.0)),
        head_dim=head_dim,
        tied_embeddings=config.flag("tie_word_embeddings", True),
        windows=tuple(windows),
        qk_norm="head",
        attention_gate="one_per_head" if config.flag("use_attention_gate", True) else "none",
        norm_placement="sandwich" if is_sandwich else "pre",
        state=convolutions(config, states, taps=7),
        attention_layers=tuple(layer for layer in range(len(kinds)) if layer not in states),
        names=TensorNames(renamed=(*(_SANDWICH if is_sandwich else ()), *NAMES, _GATE)),
    )


def _kinds(config: ConfigReader) -> list[str]:
    """The kind of each layer: two of four are convolutions unless stated."""
    num_layers = config.count("num_hidden_layers")
    kinds = config.values.get("layer_types")
    if kinds is None:
        turns = ["sliding_attention", "conv", "full_attention", "conv"]
        return ["conv", *(turns[layer % 4] for layer in range(1, num_layers))]
    known = {"conv", "full_attention", "sliding_attention"}
    names = ", ".join(sorted(known))
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= known:
        raise CheckpointError(
            f"{config.source}: layer_types must name {num_layers} layers {names}, got {kinds!r}"
        )
    return kinds


def _with(config: ConfigReader, **values: object) -> ConfigReader:
    return ConfigReader({**config.values, **values}, config.source)
