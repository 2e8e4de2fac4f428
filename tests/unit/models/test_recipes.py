"""Recipes of training: what they make stands where serving needs it, and learning lowers what it should."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from engine.quantization.at_load import int4_weight
from models.corpus import Mixture, documents
from models.recipes import distillation, pruning, quantization_aware
from models.recipes.distillation import Teaching
from models.recipes.fine_tune import IGNORED, Course, answer_loss, batches, open_model, read_lessons
from services.supervisor.config import BUNDLED_MODEL

GROUP = 64
MAX_TOKENS = 96


@pytest.fixture(scope="module")
def lessons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lessons") / "lessons.jsonl"
    source = documents(Mixture(sequence_length=256, recall_share=0.1), 7, "train")
    rows = [each for each in (next(source) for _ in range(60)) if each.messages]
    texts = (json.dumps({"messages": list(each.messages), "tools": list(each.tools)}) for each in rows)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def course(lessons: Path, steps: int) -> Course:
    return Course(data=lessons, steps=steps, rate=1e-3, max_tokens=MAX_TOKENS)


def loss_of(folder: Path, lessons: Path) -> float:
    """Mean loss of a few batches, as they come."""
    model, tokenizer = open_model(folder)
    source = batches(read_lessons(lessons, tokenizer, MAX_TOKENS), tokenizer.pad_token_id)
    with torch.no_grad():
        return sum(float(answer_loss(model, next(source))) for _ in range(6)) / 6


def layers_of(folder: Path) -> dict[str, torch.Tensor]:
    model, _ = open_model(folder)
    return {
        name: each.weight.detach()
        for name, each in model.named_modules()
        if isinstance(each, torch.nn.Linear) and "lm_head" not in name
    }


def test_only_answers_are_learned(lessons: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    batch = next(batches(read_lessons(lessons, tokenizer, MAX_TOKENS), tokenizer.pad_token_id))
    row = json.loads(lessons.read_text().splitlines()[0])
    assert batch.ids.shape == batch.targets.shape
    for ids, targets in zip(batch.ids, batch.targets, strict=True):
        learned = targets != IGNORED
        assert torch.equal(targets[learned], ids[learned])
        text = tokenizer.decode(ids[~learned], skip_special_tokens=False)
        assert text.replace("<|endoftext|>", "").endswith("<|im_start|>assistant\n"), (text, row)


def test_rounded_weights_stand_on_levels_of_the_engine(tmp_path: Path, lessons: Path) -> None:
    quantization_aware.train(BUNDLED_MODEL, tmp_path / "out", course(lessons, 2), GROUP)
    before, after = layers_of(BUNDLED_MODEL), layers_of(tmp_path / "out")
    for name, weight in after.items():
        assert not torch.equal(weight, before[name])
        dense = int4_weight(weight, GROUP).dequantize().float()
        # bfloat16 keeps eight bits of each level.
        assert (dense - weight).abs().max() <= weight.abs().max() * 2**-7, name


def test_training_with_rounding_lowers_the_loss_that_rounding_made(tmp_path: Path, lessons: Path) -> None:
    for steps in (0, 10):
        quantization_aware.train(BUNDLED_MODEL, tmp_path / str(steps), course(lessons, steps), 128)
    assert loss_of(tmp_path / "10", lessons) < 0.9 * loss_of(tmp_path / "0", lessons)


@pytest.mark.parametrize(("pattern", "zeros"), [("2:4", 0.5), ("30%", 0.3)])
def test_pruned_weights_stay_zero_through_training(
    tmp_path: Path, lessons: Path, pattern: str, zeros: float
) -> None:
    pruning.train(BUNDLED_MODEL, tmp_path / "out", course(lessons, 2), pattern)
    for name, weight in layers_of(tmp_path / "out").items():
        assert abs(float((weight == 0).float().mean()) - zeros) < 0.01, name
        if pattern == "2:4":
            assert bool(((weight.reshape(-1, 4) == 0).sum(1) >= 2).all()), name


@pytest.mark.parametrize("pattern", ["4:2", "0%", "100%", "half", ""])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="--pattern"):
        pruning.prune_layers([], pattern)


@pytest.mark.parametrize("teacher", [None, BUNDLED_MODEL])
def test_a_student_of_fewer_layers_learns(tmp_path: Path, lessons: Path, teacher: Path | None) -> None:
    for steps in (0, 10):
        teaching = Teaching(layers=4, teacher=teacher)
        distillation.train(BUNDLED_MODEL, tmp_path / str(steps), course(lessons, steps), teaching)
    assert json.loads((tmp_path / "10" / "config.json").read_text())["num_hidden_layers"] == 4
    assert loss_of(tmp_path / "10", lessons) < 0.9 * loss_of(tmp_path / "0", lessons)


def test_wrong_lessons_are_named(tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    line = json.dumps({"messages": turns})
    path.write_text(f'{line}\n{{"text": "b"}}\n')
    with pytest.raises(ValueError, match=r"wrong\.jsonl:2"):
        read_lessons(path, tokenizer, 200)
    path.write_text(f"{line}\n")
    with pytest.raises(ValueError, match="--max-tokens"):
        read_lessons(path, tokenizer, 2)


def test_layers_that_are_not_there_are_named() -> None:
    model, _ = open_model(BUNDLED_MODEL)
    with pytest.raises(ValueError, match=r"--layers: the model has 6"):
        distillation.shortened(model, 7)
