"""MiniCPM 3: latent attention, and factors of embeddings, half layers and logits."""

from __future__ import annotations

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family
from engine.model.families.deepseek import read_latent
from engine.model.spec import CheckpointError, ModelSpec


@family("MiniCPM3ForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Half layers count by `scale_depth` over the root of their number, which makes the stream smaller here
    (as in `granite`), and not what they give larger.
    """
    hidden, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    defaults = {
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "tie_word_embeddings": True,
    }
    given = {"v_head_dim": config.count("v_head_dim", hidden // config.count("num_attention_heads"))}
    inner = ConfigReader({**defaults, **config.values, **given}, config.source)
    spec = read_latent(inner, None, interleaved=False, default_eps=1e-5)
    depth = config.number("scale_depth", 1.4 if "scale_depth" not in config.values else num_layers**0.5)
    base = config.number("dim_model_base", 256 if "dim_model_base" not in config.values else hidden)
    multiplier = depth / num_layers**0.5
    if not multiplier or not base:
        raise CheckpointError(f"{config.source}: scale_depth and dim_model_base cannot be 0")
    return msgspec.structs.replace(
        spec,
        embedding_scale=config.number("scale_emb", 12) / multiplier,
        norm_eps=spec.norm_eps / multiplier**2,
        logit_scale=base / hidden,
    )
