"""Granite 3, and 4 with Mamba 2 in some layers: multipliers of embeddings, scores, half layers and logits;
experts in one tensor, perhaps beside a shared feed-forward. Granite SWA has windows with attention sinks and
a rotation for each layer, HyperCLOVA X norms after the half layers, too.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.bamba import mamba2
from engine.model.families.base import (
    attention_biases,
    decoder_spec,
    family,
    head_size,
    mixed_layers,
    some_rotate,
    unturned,
    windows_of,
)
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, TensorNames

_EXPERTS = TensorNames(
    renamed=(
        (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
        (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
        (r"\.block_sparse_moe\.router\.(layer\.)?", ".mlp.gate."),
        # As they are called since the experts are one module.
        (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
        (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
    )
)


@family("GraniteForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return _scaled(config, mlp_bias=config.flag("mlp_bias", False))


@family("GraniteSWAForCausalLM")
def read_windows(config: ConfigReader) -> ModelSpec:
    """Every fourth layer, from the first on, looks at everything."""
    return _scaled(
        config,
        default_eps=1e-5,
        mlp_bias=config.flag("mlp_bias", False),
        tied_embeddings=config.flag("tie_word_embeddings", True),
        **_sliding(config),
    )


@family("GraniteMoeSWAForCausalLM")
def read_expert_windows(config: ConfigReader) -> ModelSpec:
    """The same with experts in every layer."""
    return read_experts(config, **_sliding(config))


@family("HyperCLOVAXForCausalLM")
def read_clova(config: ConfigReader) -> ModelSpec:
    """HyperCLOVA X SEED Think: logits are multiplied where Granite's are divided."""
    placement = "sandwich" if config.flag("use_post_norm", True) else "pre"
    if placement == "sandwich":
        # The norm behind a half layer would have to be multiplied, whose eps is the checkpoint's.
        config.require("residual_multiplier", 1.0, 1.0)
    scaling = config.number("logits_scaling", 1.0)
    spec = _scaled(
        config.without("logits_scaling"),
        attention_scale=config.number("attention_multiplier", head_size(config) ** -0.5),
        mlp_bias=config.flag("mlp_bias", False),
        norm_placement=placement,
        names=_CLOVA if placement == "sandwich" else TensorNames(),
    )
    return msgspec.structs.replace(spec, logit_scale=scaling)


@family("GraniteMoeForCausalLM")
@family("GraniteMoeSharedForCausalLM")
def read_experts(config: ConfigReader, **positions: Any) -> ModelSpec:
    """With experts in every layer."""
    experts = ExpertSpec(
        num_experts=config.count("num_local_experts", 8),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        scoring="softmax_of_best",
        shared_intermediate_size=config.integer("shared_intermediate_size", 0),
        layout="separate" if config.text("experts_layout", "stacked") == "separate" else "stacked",
    )
    is_fused = experts.layout == "stacked"
    return _scaled(config, fused_gate_up=is_fused, experts=experts, names=_EXPERTS, **positions)


_CLOVA = TensorNames(
    renamed=(
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_norm1\.", ".post_attention_layernorm."),
        (r"\.post_norm2\.", ".post_feedforward_layernorm."),
    )
)


def _sliding(config: ConfigReader) -> dict[str, Any]:
    """Windows, sinks, and layers that each rotate by a base of their own; 0 is none."""
    num_layers = config.count("num_hidden_layers")
    rope = config.rope(head_size(config))
    thetas = config.values.get("layer_rope_theta") or [rope.theta] * num_layers
    if (
        not isinstance(thetas, list)
        or len(thetas) != num_layers
        or any(type(each) not in (int, float) or each < 0 for each in thetas)
    ):
        raise CheckpointError(
            f"{config.source}: layer_rope_theta must list the bases of {num_layers} layers, got {thetas!r}"
        )
    kinds = list(dict.fromkeys(thetas))
    return {
        "ropes": tuple(
            msgspec.structs.replace(rope, theta=float(theta)) if theta else unturned(rope) for theta in kinds
        ),
        "rope_of_layer": tuple(map(kinds.index, thetas)),
        "windows": windows_of(
            config,
            default=[layer % 4 != 0 for layer in range(num_layers)],
            window=config.count("sliding_window", 128),
        ),
        "attention_sinks": True,
    }


_DENSE = TensorNames(
    renamed=(
        (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
        (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
    )
)


@family("GraniteMoeHybridForCausalLM")
def read_hybrid(config: ConfigReader) -> ModelSpec:
    """Granite 4; without experts the shared feed-forward is the only one."""
    num_layers = config.count("num_hidden_layers")
    attending, others = mixed_layers(
        config,
        default=["mamba"] * num_layers,
        state="mamba",
        keys=("layer_types", "layers_block_type"),
    )
    rope = config.rope(head_size(config))
    rotates = [config.values.get("position_embedding_type") == "rope"] * num_layers
    fields = some_rotate(rope, rotates) | {
        "state": mamba2(config, others),
        "attention_layers": attending,
    }
    if config.integer("num_local_experts", 8):
        spec = read_experts(config, **fields)
    else:
        size = config.count("shared_intermediate_size")
        is_fused = config.text("experts_layout", "stacked") == "stacked"
        spec = _scaled(config, intermediate_size=size, fused_gate_up=is_fused, names=_DENSE, **fields)
    names = TensorNames(renamed=(*spec.names.renamed, (r"\.mamba\.", ".state.")))
    return msgspec.structs.replace(spec, names=names)


def _scaled(config: ConfigReader, *, default_eps: float = 1e-6, **fields: Any) -> ModelSpec:
    # Half layers begin with norms, to which the size of the stream is nothing but their eps: a stream that is
    # smaller by the multiplier adds what half layers give as it is.
    multiplier = config.number("residual_multiplier", 1.0)
    scaling = config.number("logits_scaling", 1.0)
    if not multiplier or not scaling:
        raise CheckpointError(f"{config.source}: residual_multiplier and logits_scaling cannot be 0")
    fields.setdefault("attention_scale", config.number("attention_multiplier", 1.0))
    spec = decoder_spec(
        config,
        default_eps=default_eps,
        **attention_biases(config),
        embedding_scale=config.number("embedding_multiplier", 1.0) / multiplier,
        logit_scale=1.0 / scaling,
        **fields,
    )
    return msgspec.structs.replace(spec, norm_eps=spec.norm_eps / multiplier**2)
