"""MiniMax-Text-01 and M1: linear attention whose heads decay at fixed rates in most layers (lightning
attention, arXiv 2501.08313), experts, and norms that take the stream's place.
"""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import decoder_spec, family, head_size, mixed_layers
from engine.model.spec import CheckpointError, ExpertSpec, ModelSpec, StateSpec, TensorNames, WeightFactors

# Of the norm behind linear attention, whatever config.json says of the others.
_SCAN_NORM_EPS = 1e-6
# Keys of checkpoints as they were published.
_OLDER = {
    f"{ours}_{part}_factor": f"layernorm_{theirs}_{part}"
    for ours, theirs in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp"))
    for part in ("alpha", "beta")
}


@family("MiniMaxM1ForCausalLM")
@family("MiniMaxText01ForCausalLM")
def read_older(config: ConfigReader) -> ModelSpec:
    """As they were published: `attn_type_list` has ones for layers that attend."""
    for key, expected in (("postnorm", True), ("shared_intermediate_size", 0)):
        config.require(key, expected, expected)
    kinds = config.numbers("attn_type_list", config.count("num_hidden_layers"))
    if kinds is None:
        raise CheckpointError(f"{config.source}: attn_type_list is missing")
    types = ["full_attention" if kind else "linear_attention" for kind in kinds]
    config = ConfigReader({**config.values, "layer_types": types}, config.source)
    return read(config.aliased(**_OLDER))


@family("MiniMaxForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Each half layer's norm is of the stream with what the half before it adds, of which one counts `alpha`
    times and the other `beta` times: to a norm that is beta / alpha times the latter, and a smaller eps.
    """
    config.require("hidden_act", "silu", "silu")
    num_layers, head_dim = config.count("num_hidden_layers"), head_size(config)
    default = ["linear_attention" if layer % 2 else "full_attention" for layer in range(num_layers)]
    attending, others = mixed_layers(config, default=default, state="linear_attention")
    alpha = config.number("mlp_alpha_factor", 1.0)
    if alpha <= 0:
        raise CheckpointError(f"{config.source}: mlp_alpha_factor = {alpha} is not above 0")
    for key in ("full_attn_alpha_factor", "linear_attn_alpha_factor"):
        config.require(key, alpha, 1.0)
    shares = {
        kind: config.number(f"{kind}_beta_factor", 1.0) / alpha
        for kind in ("full_attn", "linear_attn", "mlp")
    }
    if not shares["full_attn"]:
        raise CheckpointError(
            f"{config.source}: full_attn_beta_factor = 0 leaves layers that attend to nothing"
        )
    partial = config.integer("rotary_dim", head_dim) / head_dim
    spec = decoder_spec(
        config,
        default_eps=1e-5,
        head_dim=head_dim,
        ropes=(
            config.rope(
                head_dim, default_theta=1_000_000.0, default_partial=partial if partial < 1 else None
            ),
        ),
        windows=(config.optional_integer("sliding_window"),) * num_layers,
        value_scale=shares["full_attn"],
        factors=(WeightFactors(name=".state.out_proj", parts=((0, shares["linear_attn"]),)),)
        if shares["linear_attn"] != 1.0
        else (),
        norm_placement="sum",
        embedding_norm=True,
        embedding_scale=1.0 / alpha,
        experts=_experts(config, num_layers, shares["mlp"]),
        state=_state(config, others, head_dim) if others else None,
        attention_layers=attending,
        names=_names(others, num_layers),
    )
    return msgspec.structs.replace(spec, norm_eps=spec.norm_eps / alpha**2)


def _experts(config: ConfigReader, num_layers: int, share: float) -> ExpertSpec:
    return ExpertSpec(
        num_experts=config.integer_of("num_local_experts", "num_experts"),
        num_active=config.count("num_experts_per_tok", 2),
        intermediate_size=config.count("intermediate_size"),
        layers=tuple(range(num_layers)),
        scaling=share,
        layout="mixtral",
    )


def _state(config: ConfigReader, layers: tuple[int, ...], head_dim: int) -> StateSpec:
    """Later heads, and later layers, decay more slowly."""
    heads, last = config.count("num_attention_heads"), config.count("num_hidden_layers") - 1
    return StateSpec(
        kind="linear",
        layers=layers,
        taps=1,
        channels=3 * heads * head_dim,
        num_heads=heads,
        num_groups=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        layout="by_group",
        # Time steps are all one.
        step_limits=(1.0, 1.0),
        rates=tuple(
            tuple(
                2.0 ** (-8.0 * (head + 1) / heads) * (1 - layer / (last + 1e-5) + 1e-5)
                for head in range(heads)
            )
            for layer in layers
        ),
        norm_size=heads * head_dim,
        norm_eps=_SCAN_NORM_EPS,
        gate_kind="sigmoid",
    )


def _names(others: tuple[int, ...], num_layers: int) -> TensorNames:
    """The norm in front of a layer is the one that takes the stream's place behind the layer before it."""
    behind = r"model.layers.{}.post_feedforward_layernorm."
    renamed = []
    for layer in range(num_layers):
        to = behind.format(layer - 1) if layer else "model.embed_norm."
        renamed.append((rf"^model\.layers\.{layer}\.input_layernorm\.", to))
    which = "|".join(map(str, others)) or "none"
    renamed.append((rf"^model\.layers\.({which})\.self_attn\.", r"model.layers.\1.state."))
    # What the rates give.
    factors = r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)$"
    return TensorNames(renamed=tuple(renamed), skipped=factors)
