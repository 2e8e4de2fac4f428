"""Adapters that can never be served, each made of a good one by a damage, with words of its refusal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Damage = Callable[[Path], None]

FIRST = "model.layers.0.self_attn.q_proj"


def configured(**values: Any) -> Damage:
    """Other values in its configuration."""

    def apply(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def written(name: str, text: str) -> Damage:
    """Another text in one of its files."""

    def apply(folder: Path) -> None:
        (folder / name).write_text(text)

    return apply


def changed(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Other tensors."""

    def apply(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def one_value(part: str, value: float, *, index: int = -1) -> Damage:
    """One number in one tensor."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        names = sorted(each for each in tensors if f"lora_{part}" in each)
        tensors[names[index]].view(-1)[index] = value

    return changed(change)


def filled(value: float) -> Damage:
    """One number in all tensors."""
    return changed(lambda tensors: [each.fill_(value) for each in tensors.values()])


def doubled(words: str) -> Damage:
    """A second tensor, of another adapter, beside those whose names hold the words."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if words in each]:
            tensors[name.replace(".weight", ".second.weight")] = tensors[name].clone()

    return changed(change)


def without(words: str) -> Damage:
    """No tensors whose names hold those words."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if words in each]:
            del tensors[name]

    return changed(change)


def renamed(words: str, to: str) -> Damage:
    """Other names of tensors."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if words in each]:
            tensors[name.replace(words, to)] = tensors.pop(name)

    return changed(change)


def cut_short(folder: Path) -> None:
    """A file of weights that ends early."""
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-16])


def both(*damages: Damage) -> Damage:
    """One after another."""

    def apply(folder: Path) -> None:
        for damage in damages:
            damage(folder)

    return apply


def gone(name: str) -> Damage:
    """One of its files is missing."""
    return lambda folder: (folder / name).unlink()


BROKEN: dict[str, tuple[Damage, str]] = {
    "NaN in an A": (one_value("A", math.nan), "lora_A.weight holds numbers that are not finite"),
    "infinity in a B": (one_value("B", math.inf), "lora_B.weight holds numbers that are not finite"),
    "minus infinity in the first A": (one_value("A", -math.inf, index=0), "lora_A.weight holds numbers"),
    "too large once it is scaled": (
        both(one_value("B", 3e38), configured(lora_alpha=1e30)),
        "not when they are multiplied by lora_alpha",
    ),
    "too large once A and B are multiplied": (filled(1e20), "multiply to numbers that are not finite"),
    "two of an A": (doubled(f"{FIRST}.lora_A"), f"two tensors of {FIRST}.lora_A"),
    "two adapters": (doubled(".lora_"), "two tensors of model.layers."),
    "rank 0": (configured(r=0), "r = 0: must be at least 1"),
    "negative rank": (configured(r=-8), "r = -8: must be at least 1"),
    "rank 0 of a pattern": (
        configured(rank_pattern={"q_proj": 0}),
        "rank_pattern.q_proj = 0: must be at least 1",
    ),
    "rank of another": (configured(r=7), "says r = 7"),
    "rank of a pattern": (configured(rank_pattern={"q_proj": 5}), "says r = 5"),
    "rank that is no number": (configured(r="four"), "Expected `int`"),
    "no pattern": (configured(rank_pattern={"q_(": 8}), "adapter_config.json: "),
    "targets that are no pattern": (configured(target_modules="q_("), "adapter_config.json: "),
    "fewer targets than tensors": (
        configured(target_modules=["q_proj"]),
        "which adapter_config.json does not name",
    ),
    "no targets": (configured(target_modules=[]), "which adapter_config.json does not name"),
    "excluded targets": (configured(exclude_modules=["v_proj"]), "which adapter_config.json does not name"),
    "layers that were not trained": (
        configured(layers_to_transform=[0]),
        "which adapter_config.json does not name",
    ),
    "more targets than tensors": (without(".q_proj."), "target_modules names 'q_proj'"),
    "a pattern with more": (
        both(without(".q_proj."), configured(target_modules=r".*_proj")),
        "has no tensors of model.layers.0.self_attn.q_proj",
    ),
    "a layer without tensors": (without(".layers.1."), "has no tensors of model.layers.1."),
    "a layer without, and no targets named": (
        both(without(".layers.1."), configured(target_modules=None)),
        "has no tensors of model.layers.1.",
    ),
    "a module without tensors": (without(f"{FIRST}."), f"has no tensors of {FIRST}"),
    "A without B": (without(f"{FIRST}.lora_B"), "q_proj: lora_B.weight is missing"),
    "B without A": (without(f"{FIRST}.lora_A"), "q_proj: lora_A.weight is missing"),
    "no tensors": (without("lora"), "holds no tensors"),
    "layers that the model has not": (renamed(".layers.1.", ".layers.99."), "layers.99"),
    "a magnitude": (renamed(f"{FIRST}.lora_A.weight", f"{FIRST}.lora_magnitude_vector"), "DoRA"),
    "a head": (renamed(f"{FIRST}.lora_A", "lm_head.lora_A"), "lm_head"),
    "experts": (renamed(".mlp.", ".mlp.experts.0."), "experts and routers take no adapters"),
    "integers": (
        changed(lambda tensors: tensors.update({name: each.int() for name, each in tensors.items()})),
        "dtype = I32; save it as one of F32",
    ),
    "a vector": (
        changed(lambda tensors: tensors.update({name: each.flatten() for name, each in tensors.items()})),
        "has shape",
    ),
    "cut short": (cut_short, "cut short"),
    "no configuration": (gone("adapter_config.json"), "there is no adapter_config.json"),
    "no weights": (gone("adapter_model.safetensors"), "there is no adapter_config.json beside"),
    "no JSON": (written("adapter_config.json", "{"), "adapter_config.json"),
    "a list": (written("adapter_config.json", "[]"), "adapter_config.json"),
    "no safetensors": (written("adapter_model.safetensors", "nothing of the kind"), "safetensors"),
    "DoRA": (configured(use_dora=True), "use_dora = false"),
}
