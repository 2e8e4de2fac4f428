"""Youtu-LLM: DeepSeek-V3's latent attention, and dense feed-forwards."""

from __future__ import annotations

from engine.model.config_reader import ConfigReader
from engine.model.families.base import family
from engine.model.families.deepseek import read_latent
from engine.model.spec import ModelSpec


@family("YoutuForCausalLM")
def read(config: ConfigReader) -> ModelSpec:
    """Youtu-LLM-2B."""
    return read_latent(
        config.completed(q_lora_rank=1536),
        None,
        interleaved=config.flag("rope_interleave", True),
        tied_embeddings=config.flag("tie_word_embeddings", True),
    )
