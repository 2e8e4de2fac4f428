"""A GGUF file as a dense folder in Hugging Face format, which is what llm-compressor reads.

Tensors and configuration come from the engine's own reader, the tokenizer from checkpoint/. Weights are
written in bfloat16, a shard at a time.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint import gguf_tokenizer
from checkpoint.files import tokenizer_file
from engine.model.gguf_config import gguf_reader
from engine.model.gguf_file import GgufFile, open_gguf
from engine.model.spec import TensorHeader
from runtime.errors import ConfigError

# Architectures whose configuration transformers reads under the same keys, by the class that computes them.
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_SHARD_WEIGHTS = 1 << 29


def check_dense(gguf: Path) -> None:
    """Raises ConfigError where a file's architecture has no dense form here."""
    architecture = gguf_reader(gguf).values["architectures"][0]
    if architecture not in MODEL_TYPES:
        raise ConfigError(
            f"{gguf}: {architecture} is not turned dense, only {', '.join(MODEL_TYPES)}; give the original "
            "checkpoint in Hugging Face format"
        )


def write_dense(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file into a folder, which appears when it is whole. Raises ConfigError."""
    check_dense(gguf)
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _write_json(partial / "config.json", _configuration(gguf))
    _write_weights(open_gguf(gguf), partial)
    _write_tokenizer(gguf, partial)
    partial.rename(folder)


def _configuration(gguf: Path) -> dict[str, Any]:
    values = dict(gguf_reader(gguf).values)
    values["model_type"] = MODEL_TYPES[values["architectures"][0]]
    values["torch_dtype"] = "bfloat16"
    if values["model_type"] == "llama" and not values.get("mlp_bias"):
        values["mlp_bias"] = False
    if "rope_scaling" in values:
        values["rope_scaling"].setdefault(
            "original_max_position_embeddings", values["max_position_embeddings"]
        )
    ends = gguf_tokenizer.eos_token_ids(gguf_tokenizer.read(gguf))
    values["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends), None)
    # Of families that have them at all; null is transformers' own default of the others.
    for name in ("use_bias", "use_qk_norm", "attention_out_bias"):
        values.pop(name, None)
    return values


def _write_weights(file: GgufFile, folder: Path) -> None:
    shards = list(_shards(file.headers))
    total, places = 0, {}
    for number, names in enumerate(shards, 1):
        shard = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: torch.from_numpy(file.array(name)).to(torch.bfloat16) for name in names}
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        total += sum(tensor.nbytes for tensor in tensors.values())
        places.update(dict.fromkeys(names, shard))
    index = {"metadata": {"total_size": total}, "weight_map": places}
    _write_json(folder / "model.safetensors.index.json", index)


def _shards(headers: Mapping[str, TensorHeader]) -> Iterator[list[str]]:
    names: list[str] = []
    weights = 0
    for name, header in headers.items():
        size = math.prod(header.shape)
        if names and weights + size > _SHARD_WEIGHTS:
            yield names
            names, weights = [], 0
        names.append(name)
        weights += size
    yield names


def _write_tokenizer(gguf: Path, folder: Path) -> None:
    beside = tokenizer_file(gguf)
    if beside != gguf:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (beside.parent / name).is_file():
                shutil.copyfile(beside.parent / name, folder / name)
        return
    metadata = gguf_tokenizer.read(gguf)
    gguf_tokenizer.converted(metadata).save(str(folder / "tokenizer.json"))
    settings = gguf_tokenizer.config(metadata)
    templates = {each["name"]: each["template"] for each in settings.pop("chat_template", [])}
    if "default" in templates:
        settings["chat_template"] = templates["default"]
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **settings},
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
