"""DeepSeek-V2 and V3: latent attention, shared and routed experts, grouped routing."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import attention_biases, decoder_spec, family, sparse_of
from engine.model.layer_spec import IndexerSpec, PredictionSpec
from engine.model.spec import (
    CheckpointError,
    ExpertSpec,
    LatentSpec,
    ModelSpec,
    RopeSpec,
    TensorNames,
    yarn_magnitude,
)

# What configurations of V3 may leave out.
_OF_V3 = {
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
}


@family("DeepseekV2ForCausalLM")
def read_v2(config: ConfigReader) -> ModelSpec:
    """Softmax scores, the best groups by their best expert."""
    config = config.completed(q_lora_rank=1536, n_shared_experts=2)
    config.require("norm_topk_prob", False, False)
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise CheckpointError(f"{config.source}: topk_method = {method!r} is not supported")
    groups = {}
    if method == "group_limited_greedy":
        groups = {"num_groups": config.integer("n_group"), "num_active_groups": config.integer("topk_group")}
    return read_latent(config, routed_experts(config, {"normalized": False, **groups}), interleaved=True)


@family("DeepseekV3ForCausalLM")
def read_v3(config: ConfigReader) -> ModelSpec:
    """Sigmoid scores with a correction in the choice, groups by their two best experts."""
    config = config.completed(**_OF_V3)
    experts = routed_experts(config, corrected_routing(config, num_groups=8, num_active_groups=4))
    return read_latent(config, experts, interleaved=config.flag("rope_interleave", True))


@family("DeepseekV32ForCausalLM")
def read_v32(config: ConfigReader) -> ModelSpec:
    """V3 with an indexer, by which attention looks at the positions that matter most."""
    config = config.completed(**_OF_V3)
    routing = corrected_routing(config, num_groups=8, num_active_groups=4)
    experts = listed_sparse(config, routed_experts(config, routing))
    spec = read_latent(config, experts, interleaved=config.flag("rope_interleave", True))
    return with_indexer(config, spec, num_heads=64)


def with_indexer(config: ConfigReader, spec: ModelSpec, *, num_heads: int, **fields: Any) -> ModelSpec:
    """A model of latent attention with an indexer; `num_heads` is by default, `fields` are IndexerSpec's."""
    kinds = config.values.get("layer_types") or ["indexed_attention"]
    if not isinstance(kinds, list) or set(map(str, kinds)) != {"indexed_attention"}:
        raise CheckpointError(
            f"{config.source}: layer_types = {kinds!r} is not supported, only 'indexed_attention'"
        )
    latent = spec.latent
    assert latent is not None, "it has latent attention"
    if not latent.query_rank:
        raise CheckpointError(f"{config.source}: q_lora_rank is missing: the indexer reads latent queries")
    indexer = IndexerSpec(
        num_heads=config.count("index_n_heads", num_heads),
        head_dim=config.count("index_head_dim", 128),
        num_chosen=config.count("index_topk", 2048),
        **fields,
    )
    if indexer.head_dim < latent.rope_dim:
        raise CheckpointError(
            f"{config.source}: index_head_dim = {indexer.head_dim} is less than the {latent.rope_dim} "
            "rotated dimensions of qk_rope_head_dim"
        )
    return msgspec.structs.replace(spec, latent=msgspec.structs.replace(latent, indexer=indexer))


def listed_sparse(config: ConfigReader, experts: ExpertSpec) -> ExpertSpec:
    """Experts in the layers that `mlp_layer_types` says, where it is there."""
    return msgspec.structs.replace(experts, layers=sparse_of(config, experts.layers))


def corrected_routing(
    config: ConfigReader, *, num_groups: int, num_active_groups: int, normalized: bool = True
) -> dict[str, Any]:
    """DeepSeek-V3's routing; the numbers of groups and `normalized` are a family's defaults."""
    return {
        "scoring": "sigmoid",
        "correction_bias": True,
        "normalized": config.flag("norm_topk_prob", normalized),
        "num_groups": config.integer("n_group", num_groups),
        "num_active_groups": config.integer("topk_group", num_active_groups),
        "group_score": "two_best",
    }


def routed_experts(
    config: ConfigReader,
    routing: dict[str, Any],
    *,
    default_dense: int = 0,
    default_scaling: float = 1.0,
    default_shared: int = 0,
) -> ExpertSpec:
    """Experts beside shared ones, but for the first layers."""
    size = config.count("moe_intermediate_size")
    first = config.integer("first_k_dense_replace", default_dense)
    return ExpertSpec(
        num_experts=config.integer_of("n_routed_experts", "num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok"),
        intermediate_size=size,
        layers=tuple(range(first, config.count("num_hidden_layers"))),
        scaling=config.number("routed_scaling_factor", default_scaling),
        shared_intermediate_size=size * config.integer("n_shared_experts", default_shared),
        **routing,
    )


def prediction(config: ConfigReader) -> dict[str, Any]:
    """Layers behind the last one, which predict several tokens at once, and are no layers of the model."""
    first, count = config.count("num_hidden_layers"), config.integer("num_nextn_predict_layers", 0)
    behind = "|".join(str(layer) for layer in range(first, first + min(count, 64)))
    if not behind:
        return {}
    own = rf"model\.layers\.{first}\."
    return {
        "names": TensorNames(skipped=rf"model\.layers\.({behind})\."),
        "prediction": PredictionSpec(
            target_size=config.count("hidden_size"),
            # They come with copies of the model's embedding and head.
            own=own + r"(?!embed_tokens\.|shared_head\.head\.)",
            renamed=(
                (rf"^{own}(?=enorm\.|hnorm\.|eh_proj\.)", "model."),
                (rf"^{own}shared_head\.", "model."),
                (rf"^{own}", "model.layers.0."),
            ),
        ),
    }


def read_latent(
    config: ConfigReader,
    experts: ExpertSpec | None,
    *,
    interleaved: bool,
    default_eps: float = 1e-6,
    **overrides: Any,
) -> ModelSpec:
    """Latent attention, and those experts; `overrides` as `decoder_spec` has them."""
    latent = LatentSpec(
        query_rank=config.optional_integer("q_lora_rank") or 0,
        kv_rank=config.count("kv_lora_rank", 512),
        nope_dim=config.count("qk_nope_head_dim", 128),
        rope_dim=config.count("qk_rope_head_dim", 64),
        value_dim=config.count("v_head_dim", 128),
    )
    rope = msgspec.structs.replace(config.rope(latent.rope_dim), interleaved=interleaved)
    head_dim = latent.nope_dim + latent.rope_dim
    return decoder_spec(
        config,
        default_eps=default_eps,
        head_dim=head_dim,
        ropes=(rope,),
        attention_scale=head_dim**-0.5 * _magnitude(rope) ** 2,
        **attention_biases(config),
        latent=latent,
        experts=experts,
        **prediction(config) | overrides,
    )


def _magnitude(rope: RopeSpec) -> float:
    """YaRN's correction of the score scale, where `mscale_all_dim` asks for it."""
    factor, coefficient = rope.parameters.get("factor"), rope.parameters.get("mscale_all_dim")
    if (
        rope.kind == "default"
        or not isinstance(coefficient, int | float)
        or not isinstance(factor, int | float)
    ):
        return 1.0
    return yarn_magnitude(float(factor), float(coefficient)) if coefficient else 1.0
