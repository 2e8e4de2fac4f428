"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, attention with a gate in the others; dense,
and with experts beside a shared one that has a gate.
"""

from __future__ import annotations

from typing import Any, Literal

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, mixed_layers, norm_eps
from engine.model.families.qwen2 import sparse_layers
from engine.model.layer_spec import PredictionSpec
from engine.model.spec import ExpertSpec, ModelSpec, StateSpec, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"^model\.language_model\.", "model."),
        (r"\.linear_attn\.", ".state."),
        (r"\.mlp\.shared_expert(?=\.|_gate\.)", ".mlp.shared_experts"),
    ),
    # Layers that draft, and, beside the text model, those that see.
    skipped=r"(mtp|model\.visual)\.",
)


@family("Qwen3NextForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """What a layer with a state projects is stored group by group, but not in GGUF."""
    experts = _experts(config, 512, 10, sparse_layers(config), config.flag("norm_topk_prob", True))
    layout: Literal["by_group", "separate"] = "by_group"
    if config.text("linear_layout", "by_group") == "separate":
        layout = "separate"
    return _read(config, layout, experts=experts if experts.layers else None)


@family("Qwen3_5ForCausalLM")
def read_dense(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    return _read(config.completed(num_key_value_heads=4), "separate")


@family("Qwen3_5MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """With experts in every layer."""
    layers = tuple(range(config.count("num_hidden_layers")))
    size = config.count("moe_intermediate_size")
    return _read(config, "separate", experts=_experts(config, 256, 8, layers, True), intermediate_size=size)


def _experts(
    config: ConfigReader, count: int, active: int, layers: tuple[int, ...], normalized: bool
) -> ExpertSpec:
    return ExpertSpec(
        num_experts=config.count("num_experts", count),
        num_active=config.count("num_experts_per_tok", active),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=layers,
        normalized=normalized,
        shared_intermediate_size=config.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _read(config: ConfigReader, layout: Literal["by_group", "separate"], **fields: Any) -> ModelSpec:
    config = config.completed(num_key_value_heads=2)
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 256)
    config.require("hidden_act", "silu", "silu")
    every = config.count("full_attention_interval", 4)
    default = ["linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)]
    attending, others = mixed_layers(config, default=default, state="linear_attention")
    heads, groups = config.count("linear_num_value_heads", 32), config.count("linear_num_key_heads", 16)
    key_dim, value_dim = config.count("linear_key_head_dim", 128), config.count("linear_value_head_dim", 128)
    config.require_multiple("linear_num_value_heads", heads, "linear_num_key_heads", groups)
    state = None
    if others:
        state = StateSpec(
            kind="delta",
            layers=others,
            taps=config.count("linear_conv_kernel_dim", 4),
            channels=2 * groups * key_dim + heads * value_dim,
            num_heads=heads,
            num_groups=groups,
            key_dim=key_dim,
            value_dim=value_dim,
            layout=layout,
            norm_size=value_dim,
            norm_eps=norm_eps(config),
        )
    return decoder_spec(
        config,
        **attention_biases(config),
        head_dim=head_dim,
        ropes=(config.rope(head_dim, default_partial=0.25),),
        qk_norm="head",
        norm_offset=True,
        attention_gate="by_head",
        state=state,
        attention_layers=attending,
        names=_NAMES,
        prediction=PredictionSpec(
            target_size=config.count("hidden_size"),
            own=r"mtp\.(fc|norm|pre_fc_norm_embedding|pre_fc_norm_hidden|layers\.0)\.",
            renamed=(
                (r"^mtp\.fc\.", "model.eh_proj."),
                (r"^mtp\.pre_fc_norm_embedding\.", "model.enorm."),
                (r"^mtp\.pre_fc_norm_hidden\.", "model.hnorm."),
                (r"^mtp\.", "model."),
            ),
        ),
        **fields,
    )
