"""OLMo: norms without weights; OLMo 2 and 3, OLMoE and FlexOlmo: queries and keys normed over all heads
together.
"""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, head_size, windows_of
from engine.model.spec import ExpertSpec, ModelSpec


@family("OlmoForCausalLM")
def read_olmo(config: ConfigReader) -> ModelSpec:
    """The first one."""
    config.require("clip_qkv", None, None)
    return decoder_spec(config, **attention_biases(config), norm="layer", norm_weights=False, norm_eps=1e-5)


@family("Olmo2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """OLMo 2: norms after the half layers."""
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        qk_norm="full",
        norm_placement="post",
    )


@family("Olmo3ForCausalLM")
def read_olmo3(config: ConfigReader) -> ModelSpec:
    """Three of four layers slide, and their rotation is not scaled."""
    num_layers, head_dim = config.count("num_hidden_layers"), head_size(config)
    windows = windows_of(
        config,
        default=[(layer + 1) % 4 != 0 for layer in range(num_layers)],
        window=config.integer("sliding_window", 4096),
    )
    whole, sliding = (
        part.rope(head_dim, layer_type=kind, default_theta=500_000.0)
        for part, kind in ((config, "full_attention"), (config.without("rope_scaling"), "sliding_attention"))
    )
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        qk_norm="full",
        norm_placement="post",
        windows=windows,
        ropes=(whole, sliding),
        rope_of_layer=tuple(0 if window is None else 1 for window in windows),
    )


@family("OlmoeForCausalLM")
def read_olmoe(config: ConfigReader) -> ModelSpec:
    """Norms before the half layers, and experts in every layer."""
    config.require("clip_qkv", None, None)
    experts = _experts(config, 64, 8)
    return decoder_spec(config, default_eps=1e-5, **attention_biases(config), qk_norm="full", experts=experts)


@family("FlexOlmoForCausalLM")
def read_flex(config: ConfigReader) -> ModelSpec:
    """OLMo 2 with experts that were trained apart."""
    return decoder_spec(
        config,
        **attention_biases(config),
        ropes=(config.rope(head_size(config), default_theta=500_000.0),),
        qk_norm="full",
        norm_placement="post",
        experts=_experts(config, 7, 5),
    )


def _experts(config: ConfigReader, num_experts: int, num_active: int) -> ExpertSpec:
    """Experts in every layer; how many, and how many of them for a token, by default."""
    return ExpertSpec(
        num_experts=config.count("num_experts", num_experts),
        num_active=config.count("num_experts_per_tok", num_active),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(config.count("num_hidden_layers"))),
        normalized=config.flag("norm_topk_prob", False),
    )
