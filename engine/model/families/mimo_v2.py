"""MiMo V2 Flash: values smaller than keys, layers with a window that have sinks, more heads of keys and a
rotation of their own, and DeepSeek-V3's routing.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, ropes_by_kind, sparse_of, windows_of
from engine.model.families.deepseek import corrected_routing, routed_experts
from engine.model.layer_spec import LayerHeads
from engine.model.spec import ModelSpec, TensorNames

_NAMES = TensorNames(
    renamed=((r"\.self_attn\.attention_sink_bias$", ".self_attn.sinks"),),
    # Layers that draft.
    skipped=r"model\.mtp\.",
)


@family("MiMoV2FlashForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """The first layer and every sixth look at everything, all but the first have experts, unless stated."""
    config.require("attention_bias", False, False)
    config.require("add_swa_attention_sink_bias", True, True)
    config.require("add_full_attention_sink_bias", False, False)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 192)
    windows = _windows(config, num_layers)
    heads = _heads(config, windows, head_dim)
    listed = config.numbers("moe_layer_freq", num_layers) or [0] + [1] * (num_layers - 1)
    sparse = sparse_of(config, [layer for layer, has in enumerate(listed) if has])
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    experts = msgspec.structs.replace(
        routed_experts(config.without("n_shared_experts"), routing), layers=sparse
    )
    return decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_dim,
        num_kv_heads=max(each.num_kv_heads for each in heads),
        layer_heads=heads,
        **_ropes(config, head_dim, windows),
        windows=windows,
        attention_sinks=True,
        sinks_in_windows=True,
        value_scale=config.number("attention_value_scale", 0.707)
        if config.values.get("attention_value_scale", 0.707) is not None
        else 1.0,
        experts=experts if sparse else None,
        names=_NAMES,
    )


def _windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """By `layer_types`, or `hybrid_layer_pattern`, which has ones for windows. A token's own position is not
    counted in `sliding_window_size`.
    """
    pattern = config.numbers("hybrid_layer_pattern", num_layers)
    slides = [bool(layer and (layer + 1) % 6) for layer in range(num_layers)]
    size = config.optional_integer("sliding_window_size")
    window = config.integer("sliding_window", 129) if size is None else size + 1
    return windows_of(config, default=slides if pattern is None else list(map(bool, pattern)), window=window)


def _heads(config: ConfigReader, windows: tuple[int | None, ...], head_dim: int) -> tuple[LayerHeads, ...]:
    """Layers with a window have twice as many heads of keys and values unless stated."""
    num_heads, value_dim = config.count("num_attention_heads"), config.count("v_head_dim", 128)
    whole = config.count("num_key_value_heads", 4)
    sliding = config.count("swa_num_key_value_heads", 2 * whole)
    for name, same in (
        ("swa_num_attention_heads", num_heads),
        ("swa_head_dim", head_dim),
        ("swa_v_head_dim", value_dim),
    ):
        config.require(name, same, same)
    for name, count in (("num_key_value_heads", whole), ("swa_num_key_value_heads", sliding)):
        config.require_multiple("num_attention_heads", num_heads, name, count)
    return tuple(
        LayerHeads(
            num_kv_heads=whole if window is None else sliding,
            head_dim=head_dim,
            value_dim=value_dim,
            num_heads=num_heads,
        )
        for window in windows
    )


def _ropes(config: ConfigReader, head_dim: int, windows: tuple[int | None, ...]) -> dict[str, object]:
    """A third of a head turns; by `rope_parameters`, or as published ones have it, beside other keys."""
    if not config.values.get("rope_parameters"):
        share = config.number("partial_rotary_factor", 0.334)
        thetas = {
            "full_attention": config.number("rope_theta", 5_000_000.0),
            "sliding_attention": config.number("swa_rope_theta", 10_000.0),
        }
        given = {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": share}
            for kind, theta in thetas.items()
        }
        values = {**config.without("rope_theta", "partial_rotary_factor").values, "rope_parameters": given}
        config = ConfigReader(values, config.source)
    return ropes_by_kind(config, head_dim, windows, partials=(0.334, 0.334))
