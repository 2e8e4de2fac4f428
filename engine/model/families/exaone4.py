"""EXAONE 4: norms after the half layers and of each head's queries and keys; windows in three of four layers
of the larger ones, whose other layers do not rotate. K-EXAONE: the same attention, norms before the half
layers, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, some_rotate, windows_of
from engine.model.families.deepseek import corrected_routing, listed_sparse, routed_experts
from engine.model.spec import CheckpointError, ModelSpec, TensorNames

_PREDICTION_ASIDE = TensorNames(
    renamed=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),), skipped=r"mtp\."
)


@family("Exaone4ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without `sliding_window` every layer looks at everything, and rotates."""
    return decoder_spec(config, default_eps=1e-5, **_attention(config), norm_placement="post")


@family("ExaoneMoEForCausalLM")
@family("ExaoneMoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """K-EXAONE; a layer that predicts several tokens at once is left out."""
    routing = corrected_routing(config, num_groups=1, num_active_groups=1)
    shared = config.integer("num_shared_experts", 1)
    named = ConfigReader({**config.values, "n_shared_experts": shared}, config.source)
    experts = listed_sparse(config, routed_experts(named, routing, default_dense=1, default_scaling=2.5))
    return decoder_spec(
        config, default_eps=1e-5, **_attention(config), experts=experts, names=_PREDICTION_ASIDE
    )


def _attention(config: ConfigReader) -> dict[str, Any]:
    config = config.completed(sliding_window=4096)
    num_layers, window = config.count("num_hidden_layers"), config.optional_integer("sliding_window")
    windows: tuple[int | None, ...] = (None,) * num_layers
    if window is not None:
        windows = windows_of(config, default=_pattern(config, num_layers), window=window)
    rotates = [window is None or each is not None for each in windows]
    return {
        **some_rotate(config.rope(head_size(config)), rotates),
        "windows": windows,
        "qk_norm": "head",
    }


def _pattern(config: ConfigReader, num_layers: int) -> list[bool]:
    """Which layers slide: all but every so many, or by letters such as "LLLG"."""
    pattern = config.values.get("sliding_window_pattern") or 4
    if isinstance(pattern, str) and set(pattern) <= {"L", "G"}:
        return [pattern[layer % len(pattern)] == "L" for layer in range(num_layers)]
    if not isinstance(pattern, int) or pattern < 1:
        raise CheckpointError(
            f"{config.source}: sliding_window_pattern = {pattern!r} is neither a number nor letters L and G"
        )
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]
