"""Heads that draft without layers of their own (Medusa, arXiv 2401.10774), in the forms that people bring:
what vLLM reads, and what Medusa's own trainer writes (as safetensors). No torch here.

    x(p) = the target's hidden state of position p behind its final norm, which its own head draws p + 1 from
    x_k(p) = blocks of x + silu(W x + b), one after another, beginning with x(p)
    token p + 2 + k ~ projection_k(x_k(p))

No draft depends on the one before it. The engine's plan and loader read this; `medusa_reading` reads the
tensors, `medusa_native` computes.
"""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.model.checkpoint import read_headers
from engine.model.config_reader import ConfigReader
from engine.model.draft_heads import FLOAT_BYTES, KEY, check_target
from engine.model.draft_tree import DraftTree
from engine.model.families.base import checkpoint_dtype
from engine.model.layer_spec import MedusaSpec
from engine.model.spec import CheckpointError, ModelSpec, TensorHeader, TensorNames
from runtime.errors import ConfigError

TOKEN_MAP = "token_map"
# What hidden states pass on their way: kept ones, normed ones, a round's own, changes and sums.
_NUM_BUFFERS = 5


def projection_name(number: int) -> str:
    """The weight that makes logits of a head."""
    return f"lm_heads.{number}.weight"


def read_medusa_spec(folder: Path) -> ModelSpec:
    """The heads in a checkpoint's folder: `vocab_size` are the ids that they draw, `num_embeddings` those of
    their target. Raises CheckpointError naming what are no heads of this kind.
    """
    reader = ConfigReader.of(folder)
    if reader.values.get("model_type") != "medusa" and "medusa_num_heads" not in reader.values:
        raise CheckpointError(
            f"{reader.source} describes no heads of Medusa: it has neither medusa_num_heads nor model_type = "
            "'medusa'; name the folder of such heads, or set engine.speculation.method to what this one is"
        )
    reader.require("logit_scale", 1.0, 1.0)
    shares = reader.flag("original_lm_head", False)
    num_heads = reader.count(_key(reader, "medusa_num_heads", "num_heads"))
    num_blocks = reader.count(_key(reader, "medusa_num_layers", "num_hidden_layers"), 1)
    names = _names(num_blocks, shares=shares)
    headers = names.of(read_headers(folder))
    projection = headers.get(projection_name(0))
    if projection is None or len(projection.shape) != 2:
        raise CheckpointError(f"{folder}: {projection_name(0)} of {num_heads} heads is missing, or no matrix")
    # Medusa's own form leaves sizes and biases to its tensors.
    has_bias = any(name.startswith("blocks.") and name.endswith(".bias") for name in headers)
    size = reader.count("hidden_size", projection.shape[1])
    vocab_size = reader.count("vocab_size", projection.shape[0])
    drawn = reader.count("truncated_vocab_size", vocab_size)
    if drawn > vocab_size:
        raise CheckpointError(
            f"{reader.source}: truncated_vocab_size = {drawn} exceeds vocab_size = {vocab_size}"
        )
    return ModelSpec(
        architecture="Medusa",
        vocab_size=drawn,
        num_embeddings=vocab_size,
        hidden_size=size,
        intermediate_size=size,
        num_layers=0,
        num_heads=1,
        num_kv_heads=1,
        head_dim=size,
        norm_eps=0.0,
        max_positions=1,
        dtype=checkpoint_dtype(reader),
        ropes=(),
        rope_of_layer=(),
        windows=(),
        attention_scale=1.0,
        names=names,
        draft_head=MedusaSpec(
            target_size=size,
            num_heads=num_heads,
            num_blocks=num_blocks,
            block_bias=reader.flag("medusa_fc_bias", has_bias),
            shares_projection=shares,
        ),
    )


def _key(reader: ConfigReader, own: str, other: str) -> str:
    """What a number goes by: vLLM takes either name."""
    return own if own in reader.values else other


def _names(num_blocks: int, *, shares: bool) -> TensorNames:
    """vLLM's names, also for tensors that are named by their places in a head's sequence of modules."""
    front = r"^(?:medusa_heads?\.)?"
    renamed = (
        (front + r"(\d+)\.(?:blocks\.)?(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (front + rf"(\d+)\.{num_blocks}\.weight$", r"lm_heads.\1.weight"),
        (front + r"(?=blocks\.|lm_head|token_map)", ""),
    )
    return TensorNames(renamed=(*renamed, (r"^lm_head\.weight$", projection_name(0))) if shares else renamed)


def check_medusa(
    heads: ModelSpec, headers: dict[str, TensorHeader], target: ModelSpec, config: EngineConfig, device: str
) -> None:
    """Raises ConfigError for heads that do not go with a model, or where there are none of their kind."""
    check_target(heads, target, config, device)
    spec, wanted = heads.draft_head, config.speculation.num_draft_tokens
    assert isinstance(spec, MedusaSpec), "read as such"
    if wanted > spec.num_heads:
        raise ConfigError(
            f"engine.speculation.num_draft_tokens = {wanted} exceeds the {spec.num_heads} heads of {KEY} = "
            f"{config.speculation.draft_model!r}, each of which drafts one token; lower it"
        )
    missing = next((name for name in _weights(spec) if name not in headers), None)
    if missing:
        raise CheckpointError(
            f"{KEY} = {config.speculation.draft_model!r} has no tensor {missing}, but its config.json says "
            f"{spec.num_heads} heads of {spec.num_blocks} layers; take a complete copy"
        )


def _weights(spec: MedusaSpec) -> list[str]:
    blocks = [
        f"blocks.{head}.layers.{layer}.weight"
        for head in range(spec.num_heads)
        for layer in range(spec.num_blocks)
    ]
    return blocks + [projection_name(head) for head in range(1 if spec.shares_projection else spec.num_heads)]


def medusa_bytes(heads: ModelSpec, config: EngineConfig) -> int:
    """What heads compute with: hidden states of each sequence, and logits in their ids and the target's."""
    width, num_rows = _NUM_BUFFERS * heads.hidden_size + heads.vocab_size, config.scheduler.max_num_seqs
    tree = DraftTree.where_asked(config)
    num_drawn = num_rows if tree is None else num_rows + tree.num_branches
    return (num_rows * width + num_drawn * heads.num_embeddings) * FLOAT_BYTES
