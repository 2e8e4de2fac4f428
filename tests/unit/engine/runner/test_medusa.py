"""Heads of Medusa: what they compute, in which forms they come, and what they do not go with. (That no output
changes by their drafts is in test_head_combinations.)
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import EngineConfig
from engine.model.medusa import medusa_bytes, read_medusa_spec
from engine.model.plan import make_plan, plan_input, weights_bytes
from engine.runner.speculation.medusa import MedusaDrafter
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.head import write_head
from services.drafter.lessons import Lesson
from services.drafter.medusa import TrainedMedusa
from services.drafter.options import DrafterMethod
from services.drafter.target import DraftedModel
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.runner.drafting import HEAD_DIM, NUM_LAYERS, speculating
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

NUM_HEADS, NUM_DRAWN = 4, 120


def written(folder: Path, out: Path, num_drawn: int = NUM_DRAWN) -> TrainedMedusa:
    """Heads of random weights for a model, as they are trained."""
    torch.manual_seed(2)
    target = DraftedModel(folder, num_rows=1, max_tokens=64, num_threads=1, method=DrafterMethod.MEDUSA)
    heads = TrainedMedusa(target, "tiny", torch.randperm(199)[:num_drawn].sort().values, NUM_HEADS)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_((parameter + 0.2 * torch.randn_like(parameter)).bfloat16())
    out.mkdir(exist_ok=True)
    write_head(heads, out)
    return heads


@pytest.fixture(scope="module")
def folder(target_folder: Path, lessons: list[Lesson]) -> Path:
    return target_folder


@pytest.fixture(scope="module")
def heads(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("heads")
    written(folder, out)
    return out


# Also where the final norm is a layer norm, and where what multiplies logits was folded into it.
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_each_head_computes_what_was_trained(family: str, tmp_path: Path) -> None:
    """Of rows of several sequences, some of which want no further draft."""
    oracle = make_checkpoint(tmp_path, family, num_hidden_layers=2, head_dim=HEAD_DIM)
    trained = written(tmp_path, tmp_path / "heads")
    ids = prompt_of(9, 199, seed=4)
    with torch.no_grad():
        # What transformers calls the last hidden state is behind the final norm.
        states = oracle(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        rounds = enumerate(trained.rounds(states, torch.tensor([ids]), NUM_HEADS))
        expected = [trained.logits(each[0], number) for number, each in rounds]
    with closing(open_runner(tmp_path, speculation=speculating(tmp_path / "heads"))) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, MedusaDrafter)
        Driver(runner).run([Job(ids, num_tokens=1)])
        drafter.heads.hidden[:9] = drafter.target.captured[0][:9]
        drafter.heads.read(9)
        for number, rows in enumerate(([0, 3, 8], [3, 8], [8], [0, 1, 2, 3, 4, 5, 6, 7, 8])):
            found = drafter.in_target_ids(drafter.heads.logits_of(number, np.array(rows)))
            drawn = torch.from_numpy(found[:, trained.kept_ids.numpy()].copy())
            torch.testing.assert_close(drawn, expected[number][rows], rtol=1e-4, atol=1e-4)
            assert (np.delete(found, trained.kept_ids.numpy(), axis=1) < -1e8).all()


def in_modules(tensors: dict[str, Tensor], front: str) -> dict[str, Tensor]:
    """By the places of modules in a head, as Medusa's own trainer writes them: a head draws all ids."""
    found = {}
    for name, each in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "blocks":
            head, _, layer, part = rest.split(".")
            found[f"{front}{head}.{layer}.linear.{part}"] = each
        elif kind == "lm_heads":
            found[f"{front}{rest.removesuffix('.weight')}.1.weight"] = each
    return found


@pytest.mark.parametrize("front", ["", "medusa_heads."])
def test_the_form_of_medusas_own_trainer_is_the_same(folder: Path, front: str, tmp_path: Path) -> None:
    """Which leaves sizes to the tensors; and vLLM's with logits of all ids of which some are drawn."""
    written(folder, tmp_path / "whole", 199)
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    own = tmp_path / "own"
    own.mkdir()
    save_file(in_modules(tensors, front), own / "medusa_lm_head.safetensors")
    config = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1, "base_model_name_or_path": "tiny"}
    (own / "config.json").write_text(json.dumps(config))
    cut = tmp_path / "cut"
    cut.mkdir()
    ids = torch.arange(0, 199, 2)
    save_file(
        {f"medusa_heads.{name}": each for name, each in tensors.items()} | {"token_map": ids},
        cut / "model.safetensors",
    )
    (cut / "config.json").write_text((tmp_path / "whole" / "config.json").read_text())
    edit_config(cut, truncated_vocab_size=100, num_heads=NUM_HEADS, medusa_num_heads=None)
    found = [logits_by(folder, each) for each in (tmp_path / "whole", own, cut)]
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0][:, ids.numpy()], found[2][:, ids.numpy()])


def logits_by(folder: Path, heads: Path) -> Any:
    """Of all heads, of one hidden state."""
    with closing(open_runner(folder, speculation=speculating(heads))) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, MedusaDrafter)
        drafter.heads.hidden[0] = np.linspace(-1, 1, drafter.heads.hidden.shape[1])
        drafter.heads.read(1)
        one = np.array([0])
        return np.concatenate(
            [drafter.in_target_ids(drafter.heads.logits_of(each, one)).copy() for each in range(NUM_HEADS)]
        )


def test_heads_may_share_what_makes_logits(folder: Path, heads: Path, tmp_path: Path) -> None:
    tensors = load_file(heads / "model.safetensors")
    shared = {name: each for name, each in tensors.items() if not name.startswith("lm_heads.")}
    save_file(shared | {"lm_head.weight": tensors["lm_heads.0.weight"]}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((heads / "config.json").read_text())
    edit_config(tmp_path, original_lm_head=True)
    found, separate = logits_by(folder, tmp_path), logits_by(folder, heads)
    assert np.array_equal(found[0], separate[0])
    assert not np.array_equal(found[1], separate[1])


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"hidden_size": 64}, {}, "reads hidden states of 48 elements, but the model's have 64"),
        ({"vocab_size": 201}, {}, "is for a vocabulary of 199 tokens, but the model's has 201"),
        ({}, {"native": "off"}, "method = 'medusa': hidden states are captured by the native kernels"),
    ],
)
def test_what_heads_do_not_go_with_is_refused_by_name(
    changes: dict[str, Any], options: dict[str, Any], words: str, heads: Path, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": NUM_LAYERS, "head_dim": HEAD_DIM} | changes
    make_checkpoint(tmp_path, "llama", **changes)
    with pytest.raises(ConfigError, match=words):
        open_runner(tmp_path, speculation=speculating(heads), **options)


@pytest.mark.parametrize(
    ("change", "removed", "words"),
    [
        ({"logit_scale": 0.5}, "", "logit_scale = 0.5 is not supported"),
        ({"truncated_vocab_size": 500}, "", "truncated_vocab_size = 500 exceeds vocab_size = 199"),
        ({"hidden_size": 40}, "", "reads hidden states of 40 elements"),
        ({"medusa_num_heads": 5}, "", "has no tensor blocks.4.layers.0.weight, .* says 5 heads of 1 layers"),
        ({"medusa_num_heads": 3}, "", "num_draft_tokens = 4 exceeds the 3 heads of .*; lower it"),
        ({"medusa_fc_bias": False}, "", r"4 unexpected tensors.*blocks.0.layers.0.bias"),
        ({}, "token_map", "tensor token_map of shape .* is missing"),
        ({}, "lm_heads.2.weight", "has no tensor lm_heads.2.weight"),
        ({"model_type": "llama", "medusa_num_heads": None}, "", "describes no heads of Medusa"),
    ],
)
def test_what_are_no_such_heads_is_refused_by_name(
    change: dict[str, Any], removed: str, words: str, folder: Path, heads: Path, tmp_path: Path
) -> None:
    tensors = load_file(heads / "model.safetensors")
    tensors.pop(removed, None)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((heads / "config.json").read_text())
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        open_runner(folder, speculation=speculating(tmp_path))


def test_on_a_gpu_heads_are_refused_before_anything_is_loaded(folder: Path, heads: Path) -> None:
    config = EngineConfig(speculation=speculating(heads))
    with pytest.raises(ConfigError, match=r"'medusa': hidden states are captured on CPUs alone"):
        plan_input(config, ModelConfig(path=str(folder)), device="cuda", available_bytes=1 << 34)


def test_the_plan_counts_the_heads_and_what_they_compute_with(folder: Path, heads: Path) -> None:
    model, available = ModelConfig(path=str(folder)), 1 << 32
    without = make_plan(plan_input(EngineConfig(), model, device="cpu", available_bytes=available))
    config = EngineConfig(speculation=speculating(heads))
    given = plan_input(config, model, device="cpu", available_bytes=available)
    plan = make_plan(given)
    assert given.draft is not None
    assert plan.weights_bytes == without.weights_bytes + weights_bytes(given.draft.weights, given.dtype)
    assert plan.workspace_bytes >= without.workspace_bytes + medusa_bytes(read_medusa_spec(heads), config)
    assert (plan.kv_bytes_per_token, plan.num_blocks) == (without.kv_bytes_per_token, without.num_blocks)
