"""`millrace train-drafter`: what is learned, that it goes on, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from typer.testing import CliRunner

from runtime.errors import ConfigError
from services.cli.app import app
from services.drafter import course
from services.drafter.course import STATE, CourseProgress, train_head
from services.drafter.head import kept_ids
from services.drafter.lessons import Lesson, batches, read_lessons
from services.drafter.options import CourseOptions, DrafterMethod
from services.drafter.target import DraftedModel
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import SPARSE
from tests.unit.engine.runner.driver import prompt_of

OPTIONS = CourseOptions(steps=8, rate=2e-3, rows=4, rounds=2, max_tokens=64, draft_vocab=0)


@pytest.fixture(scope="module", params=list(DrafterMethod))
def target(request: Any, tmp_path_factory: pytest.TempPathFactory) -> DraftedModel:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama")
    return DraftedModel(folder, num_rows=4, max_tokens=64, num_threads=1, method=request.param)


@pytest.fixture(scope="module")
def lessons() -> list[Lesson]:
    return [Lesson(prompt_of(20 + index, 199, seed=index), index) for index in range(10)]


def test_answers_are_learned_as_the_template_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    # A separator of lines to Unicode, which JSON may have in a string.
    text_line = json.dumps({"text": "One two\u2028three."}, ensure_ascii=False)
    path.write_text(json.dumps({"messages": said}) + f"\n\n{text_line}\n", encoding="utf-8")
    chat, text = read_lessons(path, BUNDLED_MODEL, 64)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    given, learned = chat.ids[: chat.num_given], chat.ids[chat.num_given :]
    assert tokenizer.decode(given, skip_special_tokens=False).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(learned, skip_special_tokens=False).startswith("Hello.<|im_end|>")
    assert text.num_given == 0
    assert tokenizer.decode(text.ids) == "One two\u2028three."


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": 1}', ":2: .*a line is one JSON object with messages, and perhaps tools, or with text"),
        ("nonsense", ":2: .*a line is one JSON object"),
        ('{"messages": []}', ":2: messages are empty"),
        ('{"text": "a", "messages": []}', ":2: give either text or messages"),
    ],
)
def test_a_line_that_teaches_nothing_is_refused_with_its_number(
    line: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": "One two three."}) + f"\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        read_lessons(path, BUNDLED_MODEL, 64)


def test_lines_that_are_all_too_long_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"text": "One two three four five six seven."}) + "\n")
    with pytest.raises(ConfigError, match="fits in 3 tokens; raise --max-tokens"):
        read_lessons(path, BUNDLED_MODEL, 3)


def test_every_line_is_learned_once_in_an_epoch_wherever_it_goes_on(lessons: list[Lesson]) -> None:
    source = batches(lessons, 4, 0)
    whole = [next(source) for _ in range(7)]
    assert sorted(id(lesson) for batch in whole[:3] for lesson in batch) == sorted(map(id, lessons))
    later = batches(lessons, 4, 5)
    assert [next(later), next(later)] == whole[5:]


def test_the_most_frequent_ids_are_kept_in_order() -> None:
    assert kept_ids([[7, 7, 3], [3, 7, 9]], 12, 2).tolist() == [3, 7]
    assert kept_ids([[1]], 12, 0).tolist() == list(range(12))


def test_learning_lowers_the_loss_and_drafts_hold(target: DraftedModel, tmp_path: Path) -> None:
    """One text again and again: it is known by heart."""
    ids = prompt_of(30, 199, seed=3)
    done: list[CourseProgress] = []
    options = CourseOptions(steps=120, rate=5e-3, rows=1, rounds=2, max_tokens=64, draft_vocab=0)
    train_head(target, [Lesson(ids, 0)], tmp_path, "tiny", options, done.append)
    assert done[-1].step == 120
    assert done[-1].loss < 0.6 * done[0].loss
    assert all(share > 0.6 for share in done[-1].held)


def test_an_interrupted_course_goes_on_to_the_same_head(
    target: DraftedModel, lessons: list[Lesson], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    train_head(target, lessons, whole, "tiny", OPTIONS, lambda done: None)

    def interrupt(done: CourseProgress) -> None:
        if done.step == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(course, "_SAVE_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, lessons, parts, "tiny", OPTIONS, interrupt)
    steps: list[int] = []
    assert (parts / STATE).exists()
    train_head(target, lessons, parts, "tiny", OPTIONS, lambda done: steps.append(done.step))
    assert steps == [6, 7, 8]
    assert not (parts / STATE).exists()
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, parts))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_course_of_other_lessons_is_not_taken_up(
    target: DraftedModel, lessons: list[Lesson], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(done: CourseProgress) -> None:
        if done.step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(course, "_SAVE_EVERY_S", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, lessons, tmp_path, "tiny", OPTIONS, interrupt)
    with pytest.raises(ConfigError, match="finish that one with its own command, or name another --out"):
        train_head(target, lessons[1:], tmp_path, "tiny", OPTIONS, lambda done: None)


@pytest.mark.parametrize(
    ("method", "num_drawn", "wrote"),
    [
        ("eagle3", 300, {"speculators_model_type": "eagle3", "draft_vocab_size": 300}),
        ("medusa", 300, {"model_type": "medusa", "vocab_size": 2048, "truncated_vocab_size": 300}),
        ("mtp", 0, {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}),
    ],
)
def test_the_command_trains_and_says_what_it_wrote(
    method: str, num_drawn: int, wrote: dict[str, Any], tmp_path: Path
) -> None:
    data, out = tmp_path / "lines.jsonl", tmp_path / "head"
    data.write_text(
        "".join(json.dumps({"text": f"The number {number} is here."}) + "\n" for number in range(9))
    )
    arguments = ["train-drafter", "bundled", "--data", str(data), "--out", str(out), "--steps", "2"]
    arguments += ["--method", method, "--draft-vocab", str(num_drawn)]
    done = CliRunner().invoke(app, [*arguments, "--rows", "2", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.output
    config = json.loads((out / "config.json").read_text())
    assert config.items() >= wrote.items()
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "there is a head already; name another folder" in again.output


def test_a_head_that_draws_as_its_model_draws_all_ids(tmp_path: Path) -> None:
    arguments = ["train-drafter", "bundled", "--data", "x", "--out", str(tmp_path), "--method", "mtp"]
    refused = CliRunner().invoke(app, [*arguments, "--draft-vocab", "300"])
    assert refused.exit_code == 2
    assert "--draft-vocab 300: with --method mtp the model's own head draws" in " ".join(
        refused.output.split()
    )


def test_no_head_is_trained_for_a_model_that_could_not_use_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_next", num_hidden_layers=4, head_dim=16, **SPARSE)
    with pytest.raises(ConfigError, match=r"Qwen3Next.* has layers that carry a state.*; no head is trained"):
        DraftedModel(tmp_path, num_rows=1, max_tokens=16, num_threads=1)
