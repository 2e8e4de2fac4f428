"""Llama 4 (text): a fourth of the layers do not rotate, one expert for each token beside a shared one."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, rotating_layers, some_rotate
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, QueryGrowth, TensorNames

_NAMES = TensorNames(
    renamed=(
        (r"\.feed_forward\.router\.", ".mlp.gate."),
        (r"\.feed_forward\.shared_expert\.", ".mlp.shared_experts."),
        (r"\.feed_forward\.", ".mlp."),
    )
)


@family("Llama4ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Layers that rotate look at chunks of `attention_chunk_size` positions, the others at everything."""
    num_layers, head_dim = config.count("num_hidden_layers"), config.count("head_dim", 128)
    rotates = rotating_layers(config, num_layers)
    rope = msgspec.structs.replace(config.rope(head_dim, default_theta=500_000.0), interleaved=True)
    turning = some_rotate(rope, rotates)
    if config.flag("attn_temperature_tuning", True):
        beta, length = config.number("attn_scale", 0.1), config.count("floor_scale", 8192)
        growth = QueryGrowth(beta=beta, length=length, offset=1)
        first, *others = turning["ropes"]
        turning["ropes"] = (first, *(msgspec.structs.replace(still, query_growth=growth) for still in others))
    every = config.count("interleave_moe_layer_step", 1)
    size = config.count("intermediate_size")
    experts = ExpertSpec(
        num_experts=config.count("num_local_experts", 16),
        num_active=config.count("num_experts_per_tok", 1),
        intermediate_size=size,
        layers=tuple(config.numbers_of("moe_layers") or range(every - 1, num_layers, every)),
        scoring="sigmoid",
        normalized=False,
        weighs_inputs=True,
        shared_intermediate_size=size,
        layout="separate" if config.text("experts_layout", "") == "separate" else "inputs_first",
    )
    return decoder_spec(
        config,
        default_eps=1e-5,
        **attention_biases(config),
        **turning,
        chunks=_chunks(config, rotates),
        head_dim=head_dim,
        intermediate_size=config.count("intermediate_size_mlp", 16384),
        qk_norm="unit" if config.flag("use_qk_norm", True) else "none",
        qk_norm_last=True,
        experts=experts,
        names=_NAMES,
    )


def _chunks(config: ConfigReader, rotates: tuple[bool, ...]) -> tuple[int | None, ...]:
    """Positions that each layer looks at together: of those that `layer_types` calls so, or else rotate."""
    chunk = config.completed(attention_chunk_size=8192).optional_integer("attention_chunk_size")
    if chunk is not None and chunk < 1:
        raise CheckpointError(f"{config.source}: attention_chunk_size = {chunk} is no number of positions")
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = ["chunked_attention" if turns else "full_attention" for turns in rotates]
    known = {"chunked_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != len(rotates) or not set(map(str, kinds)) <= known:
        raise CheckpointError(
            f"{config.source}: layer_types must name {len(rotates)} layers chunked_attention or "
            f"full_attention, got {kinds!r}"
        )
    return tuple(chunk if kind == "chunked_attention" else None for kind in kinds)
