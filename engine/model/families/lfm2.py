"""LFM2: gated short convolutions, and attention in some layers; dense, and with experts in all but the first
layers.
"""

from __future__ import annotations

from typing import Any

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, mixed_layers
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, StateSpec, TensorNames

NAMES = (
    (r"\.conv\.conv\.", ".state.conv1d."),
    (r"\.conv\.(in|out)_proj\.", r".state.\1_proj."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.(q|k)_layernorm\.", r".\1_norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.mlp\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
)


@family("Lfm2ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Without experts."""
    full = config.numbers_of("full_attn_idxs") or range(config.count("num_hidden_layers"))
    size = config.integer_of("block_ff_dim", "intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        factor, multiple = config.optional_number("block_ffn_dim_multiplier"), 256
        if factor is not None or "block_ffn_dim_multiplier" not in config.values:
            multiple = config.count("block_multiple_of", multiple)
            size = -(-int((1.0 if factor is None else factor) * size) // multiple) * multiple
    return _read(config, tuple(full), intermediate_size=size)


@family("Lfm2MoeForCausalLM")
def read_experts(config: ConfigReader) -> ModelSpec:
    """With experts whose choice a bias may correct."""
    num_layers = config.count("num_hidden_layers")
    experts = ExpertSpec(
        num_experts=config.count("num_experts", 32),
        num_active=config.count("num_experts_per_tok", 4),
        intermediate_size=config.count("moe_intermediate_size"),
        layers=tuple(range(config.integer("num_dense_layers", 2), num_layers)),
        scoring="sigmoid",
        normalized=config.flag("norm_topk_prob", True),
        scaling=config.number("routed_scaling_factor", 1.0),
        correction_bias=config.flag("use_expert_bias", True),
    )
    return _read(config, (), experts=experts)


def _read(config: ConfigReader, full: tuple[int, ...], **fields: Any) -> ModelSpec:
    num_layers = config.count("num_hidden_layers")
    default = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    attending, others = mixed_layers(config, default=default, state="conv")
    tied = config.flag("tie_word_embeddings", config.flag("tie_embedding", True))
    return decoder_spec(
        config,
        norm_eps=config.number("norm_eps", 1e-5),
        tied_embeddings=tied,
        ropes=(config.rope(head_size(config), default_theta=1_000_000.0),),
        qk_norm="head",
        state=convolutions(config, others, taps=3),
        attention_layers=attending,
        names=TensorNames(renamed=NAMES),
        **fields,
    )


def convolutions(config: ConfigReader, layers: tuple[int, ...], *, taps: int) -> StateSpec | None:
    """The convolutions of these layers, of so many taps by default."""
    if not layers:
        return None
    taps, bias = config.count("conv_L_cache", taps), config.flag("conv_bias", False)
    if taps == 1:
        raise CheckpointError(
            f"{config.source}: conv_L_cache = 1 is not supported, as such a convolution keeps no state; "
            "2 is the least"
        )
    return StateSpec(
        kind="convolution",
        layers=layers,
        taps=taps,
        channels=config.count("hidden_size"),
        convolution_bias=bias,
        bias=bias,
    )
