"""`millrace train-kvzap`: what is learned is what the paper says, and what comes of it is served."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from typer.testing import CliRunner

from contract.retention import Retention
from engine.config import CacheConfig, EngineConfig
from engine.model.kv_scorer import find_scorer
from engine.runner.build import build_here
from models.recipes.repository_texts import pieces
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.cli.app import app
from services.drafter.lessons import Lesson, read_lessons
from services.kvzap.fit import LayerSums, fit
from services.kvzap.targets import RepeatingModel
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_plan import LATENT_SIZES
from tests.unit.engine.runner.test_chosen import answer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in pieces(16, 400)))
    return path


@pytest.fixture(scope="module")
def lessons(data: Path) -> list[Lesson]:
    return read_lessons(data, BUNDLED_MODEL, 512)


@pytest.fixture(scope="module")
def repeating() -> RepeatingModel:
    return RepeatingModel(BUNDLED_MODEL, max_tokens=512, num_threads=1)


@pytest.fixture(scope="module")
def oracle() -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(
        BUNDLED_MODEL, dtype=torch.float32, attn_implementation="eager"
    )


def collected(model: Any, ids: list[int], text: slice, again: slice) -> list[tuple[Any, Any]]:
    """States [N, E] and log scores [N, K] by layer, as `kvzap/data.py` of kvpress has it (Apache-2.0)."""
    found: list[tuple[Any, Any]] = []

    def hook(module: Any, _: Any, given: dict[str, Any], output: Any) -> None:
        hidden = given["hidden_states"]
        values = given["past_key_values"].layers[module.layer_idx].values
        scores = torch.einsum("bhti,bt->bhti", output[1], 1 / hidden.norm(dim=-1))
        repeated = values.repeat_interleave(module.num_key_value_groups, 1)
        weight = module.o_proj.weight.transpose(0, 1)
        weight = weight.view(model.config.num_attention_heads, values.shape[-1], model.config.hidden_size)
        norms = torch.einsum("hij,bhti->bhtj", weight, repeated).norm(dim=-1)
        scores = torch.einsum("bhti,bhi->bhti", scores, norms)[:, :, again, text].amax(2)
        scores = scores.view(1, -1, module.num_key_value_groups, scores.shape[2]).amax(2)
        found.append((hidden[0, text], scores.log()[0].T))

    hooks = [each.self_attn.register_forward_hook(hook, with_kwargs=True) for each in model.model.layers]
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=True)
    for each in hooks:
        each.remove()
    return found


def test_targets_are_those_of_the_paper(
    repeating: RepeatingModel, lessons: list[Lesson], oracle: transformers.PreTrainedModel
) -> None:
    """Within what bfloat16 rounds of keys and values."""
    told: list[tuple[int, NDArray[Any], NDArray[Any]]] = []
    repeating.teach(lessons[0], lambda *taught: told.append(taught))
    ids, text, again = repeating._repetition.ids(lessons[0])
    assert ids[text] == ids[again] == lessons[0].ids
    theirs = collected(oracle, ids, text, again)
    assert [layer for layer, _, _ in told] == list(range(len(theirs)))
    for (_, states, targets), (hidden, scores) in zip(told, theirs, strict=True):
        np.testing.assert_allclose(states, hidden, rtol=0.1, atol=0.1)
        assert np.abs(targets - scores.numpy()).mean() < 0.02
        assert np.corrcoef(targets.ravel(), scores.numpy().ravel())[0, 1] > 0.999


def test_the_prompt_is_asked_for_again_by_the_template(
    repeating: RepeatingModel, lessons: list[Lesson]
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    ids, text, again = repeating._repetition.ids(lessons[1])
    said = tokenizer.decode(ids[text])
    asked = [{"role": "user", "content": f"{said}\n\nRepeat the previous context exactly."}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == before + said
    assert again.stop == len(ids)


def test_the_fit_is_ridge_regression() -> None:
    random = np.random.default_rng(0)
    states = random.standard_normal((400, 12)).astype(np.float32)
    targets = states.astype(np.float64) @ random.standard_normal((12, 3)) + [1.0, -2.0, 0.5]
    sums = LayerSums(12, 3)
    for start in range(0, 400, 50):
        sums.add(states[start : start + 50], targets[start : start + 50])
    weight, bias = sums.solved()
    centered = states - states.mean(0)
    rows = np.concatenate([centered, np.eye(12)])
    wanted = np.linalg.lstsq(rows, np.concatenate([targets - targets.mean(0), np.zeros((12, 3))]), rcond=None)
    np.testing.assert_allclose(weight, wanted[0].T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bias, targets.mean(0) - states.mean(0) @ wanted[0], rtol=1e-4, atol=1e-4)


def test_what_was_learned_foresees_other_texts(repeating: RepeatingModel, lessons: list[Lesson]) -> None:
    done: list[int] = []
    scorer, explained = fit(repeating, lessons, done.append)
    assert done == list(range(1, len(lessons) + 1))
    # A constant explains nothing.
    assert 0.05 < explained < 1
    for (weight, _), *_ in scorer.layers:
        assert np.abs(weight).max() > 1e-4


def test_the_command_writes_what_an_engine_chooses_by(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "scorer"
    command = ["train-kvzap", "bundled", "--data", str(data), "--out", str(out), "--threads", "1"]
    trained = CliRunner().invoke(app, command)
    assert trained.exit_code == 0, trained.output
    assert "it explains 0." in trained.output
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2
    assert "there is a model already" in again.output
    config = EngineConfig(num_threads=1, cache=CacheConfig(kv_cache_bytes=32 << 20, kvzap=str(out)))
    runner, _, facts = build_here(config, ModelConfig(path=str(BUNDLED_MODEL)), lambda phase, part: None)
    assert not facts.unscored_because
    with closing(runner):
        prompt = [300 + each * 7 % 900 for each in range(240)]
        kept = Retention(policy="kvzap", keep=0.6)
        plain, chosen = (answer(runner, prompt, each)[0][0] for each in (None, kept))
    assert plain[0] == chosen[0]
    assert plain != chosen


def test_what_cannot_be_trained_is_refused(data: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "latent", "deepseek_v3", **LATENT_SIZES, vocab_size=2048)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "latent" / file).write_bytes((BUNDLED_MODEL / file).read_bytes())
    with pytest.raises(ConfigError, match="its latent attention keeps one vector for all heads; no scorer"):
        RepeatingModel(tmp_path / "latent", max_tokens=32, num_threads=1)
    with pytest.raises(ConfigError, match=r"--max-tokens: a text of 3000 .*'s 4096 positions; set it to 20"):
        RepeatingModel(BUNDLED_MODEL, max_tokens=3000, num_threads=1)
    few = ["train-kvzap", "bundled", "--data", str(data), "--out", str(tmp_path / "no"), "--max-tokens", "16"]
    assert CliRunner().invoke(app, few).exit_code == 2
    (tmp_path / "few.jsonl").write_text('{"text": "One two three four."}\n')
    few[3] = str(tmp_path / "few.jsonl")
    refused = CliRunner().invoke(app, few)
    assert refused.exit_code == 2
    assert "1 of its lines have up to 16 tokens; give 8" in " ".join(refused.output.split())
    file = tmp_path / "few.jsonl"
    nowhere = ["train-kvzap", "bundled", "--data", str(data), "--out", str(file / "no")]
    refused = CliRunner().invoke(app, nowhere)
    assert (refused.exit_code, "Not a directory" in refused.output) == (2, True)
    assert find_scorer("", BUNDLED_MODEL, None, "no") is None  # type: ignore[arg-type]
