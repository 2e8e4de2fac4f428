"""Model families: each turns a checkpoint's `config.json` into a ModelSpec. No torch here.

A family is one file and its name below: its functions enter themselves (`base.family`).
"""

from __future__ import annotations

from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from checkpoint.files import is_gguf, tokenizer_file
from checkpoint.pooling import read_pooling
from checkpoint.vocabulary import read_token_ids
from engine.model.config_reader import ConfigReader
from engine.model.families import (  # noqa: F401
    afmoe,
    apertus,
    arcee,
    axk1,
    bailing,
    bamba,
    bert,
    cohere,
    cwm,
    deepseek,
    dots1,
    ernie4_5,
    exaone4,
    falcon,
    falcon_h1,
    flint,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    gte,
    helium,
    hunyuan,
    hy_v3,
    jais2,
    jamba,
    kimi_linear,
    laguna,
    lfm2,
    lfm3,
    llama,
    llama4,
    mamba,
    mamba2,
    mellum,
    mimo_v2,
    minicpm3,
    minimax,
    minimax_m2,
    mistral,
    modernbert,
    multimodal,
    nanochat,
    nemotron,
    nemotron_h,
    nomic_bert,
    olmo2,
    olmo_hybrid,
    opt,
    phi,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen3_next,
    recurrent_gemma,
    seed_oss,
    smollm3,
    solar_open,
    stablelm,
    starcoder2,
    youtu,
    zamba2,
)
from engine.model.families.base import FAMILIES, Family
from engine.model.gguf_config import gguf_reader, gguf_scheme
from engine.model.spec import CheckpointError, ModelSpec, TensorNames
from engine.quantization.scheme import read_scheme


def read_spec(folder: Path) -> ModelSpec:
    """The model in a checkpoint's folder. Raises CheckpointError naming an architecture that is unknown."""
    reader = gguf_reader(folder) if is_gguf(folder) else ConfigReader.of(folder)
    architectures = reader.values.get("architectures") or ["(none)"]
    if not isinstance(architectures, list):
        raise CheckpointError(f"{reader.source}: architectures = {architectures!r} is not a list")
    for name in architectures:
        if isinstance(name, str) and (read := FAMILIES.get(name) or _pooling_family(name)) is not None:
            scheme = gguf_scheme(folder) if is_gguf(folder) else read_scheme(reader.values, reader.source)
            spec = _pooled(_with_ids(read(reader), folder), folder)
            if name in multimodal.WHOLES:
                spec = multimodal.tied_as_stored(spec, folder)
            return msgspec.structs.replace(spec, architecture=name, quantization=scheme)
    raise CheckpointError(
        f"{reader.source}: architecture {', '.join(map(str, architectures))} is not supported; supported are "
        f"{', '.join(sorted(FAMILIES))}{_nearest(architectures)}; vLLM's engine may have it "
        "(millrace up --engine vllm)"
    )


def _pooling_family(name: str) -> Family | None:
    """What reads a decoder without its head, or with one that classifies: as its family's with one is
    read.
    """
    for suffix in ("Model", "ForSequenceClassification"):
        base = FAMILIES.get(f"{name.removesuffix(suffix)}ForCausalLM")
        if name.endswith(suffix) and base is not None:
            return partial(_headless, base)
    return None


def _headless(base: Family, reader: ConfigReader) -> ModelSpec:
    spec = base(reader)
    names = spec.names
    # Without a head the names begin one level further in.
    prefixed = (r"^(?!model\.|score\.|lm_head\.)", "model.")
    renamed = TensorNames(renamed=(prefixed, *names.renamed), skipped=names.skipped)
    return msgspec.structs.replace(spec, names=renamed, classifier="score")


def _pooled(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with what the checkpoint's files say of how it pools. Raises ConfigError naming the file."""
    pooling = read_pooling(folder)
    if pooling is None:
        if spec.bidirectional:
            raise CheckpointError(f"{folder}: nothing says how its hidden states become an answer")
        return spec
    size = pooling.dense[0].inputs if pooling.dense else pooling.asked.num_dimensions
    if size and size != spec.hidden_size and not pooling.classifies:
        raise CheckpointError(
            f"{folder}: modules.json pools {size} elements, but the model's hidden size is {spec.hidden_size}"
        )
    return msgspec.structs.replace(spec, pooling=pooling)


def _nearest(architectures: list[Any]) -> str:
    """The one whose name is most like an unknown one's, which weights of another layout do not fit."""
    found = [near for name in architectures for near in get_close_matches(str(name), FAMILIES, 1, cutoff=0.7)]
    return f"; nearest is {found[0]}" if found else ""


def _with_ids(spec: ModelSpec, folder: Path) -> ModelSpec:
    """The spec with the ids that the checkpoint's tokenizer has, where it has one."""
    ids, rows = read_token_ids(folder), spec.num_embeddings
    if ids.num_of_text > rows:
        raise CheckpointError(
            f"{tokenizer_file(folder)}: the tokenizer has {ids.num_of_text} ids, but the model has only "
            f"{rows} rows for them (vocab_size); take the tokenizer that the model was trained with"
        )
    beyond = [token_id for token_id in ids.end if token_id >= rows]
    if beyond:
        raise CheckpointError(
            f"{folder}: eos_token_id {beyond[0]} is beyond the model's {rows} rows (vocab_size); correct it "
            "in generation_config.json, config.json or tokenizer_config.json"
        )
    vocab_size = min(ids.count, rows) if ids.count else rows
    holes = tuple(token_id for token_id in ids.holes if token_id < vocab_size)
    return msgspec.structs.replace(spec, vocab_size=vocab_size, holes=holes, eos_token_ids=ids.end)
