"""Checkpoints of families of 2026 as they are published, where transformers saves them otherwise."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.model.newer_cases import CASES
from tests.unit.engine.runner.driver import Job, generated, prompt_of


def renamed(folder: Path, pattern: str, to: str) -> int:
    """Renames the checkpoint's tensors; the number of those whose names match."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({re.sub(pattern, to, name): tensor for name, tensor in tensors.items()}, path)
    return sum(bool(re.search(pattern, name)) for name in tensors)


@pytest.mark.parametrize(
    ("name", "pattern", "to"),
    [
        ("axk1", r"\.mlp\.post_mlp_layernorm\.", ".post_mlp_layernorm."),
        ("axk1", r"(?<!mlp)\.post_mlp_layernorm\.", ".mlp.post_mlp_layernorm."),
        ("hy-v3", r"\.mlp\.gate\.", ".mlp.router.gate."),
        ("hy-v3", r"\.mlp\.router\.gate\.", ".mlp.gate."),
        ("hy-v3", r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
        ("hy-v3", r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        ("hy-v3", r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
    ],
)
def test_either_name_is_known(name: str, pattern: str, to: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    renamed(tmp_path, pattern, to)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


def test_choices_that_nothing_corrects_and_norms_that_nothing_uses(tmp_path: Path) -> None:
    """A.X K1 is published without corrections, and with the norm behind experts in dense layers as well."""
    model_type, changes = CASES["axk1"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    for name, tensor in oracle.named_buffers():
        if name.endswith("e_score_correction_bias"):
            tensor.zero_()
    path = tmp_path / "model.safetensors"
    tensors = {name: each for name, each in load_file(path).items() if "correction" not in name}
    assert len(tensors) < len(load_file(path))
    save_file(tensors | {"model.layers.0.post_mlp_layernorm.weight": torch.randn(48)}, path)
    (job,) = generated(tmp_path, [Job(prompt_of(20, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)


def test_the_layer_that_drafts_is_left_out(tmp_path: Path) -> None:
    model_type, changes = CASES["hy-v3"]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.layers.3.eh_proj.weight": torch.randn(48, 96)}, path)
    (job,) = generated(tmp_path, [Job(prompt_of(9, 199), num_tokens=4)])
    assert job.output == reference_greedy(oracle, job.prompt, 4)
