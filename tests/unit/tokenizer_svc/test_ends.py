"""Ends of answers that only the chat template implies, for the templates of all families."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from tests.unit.tokenizer_svc.checkpoints import byte_level, write
from tests.unit.tokenizer_svc.families import CHATML, FAMILIES, MORE, make
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint
from tokenizer_svc.text.ends import with_implied_end

OTHER = "<|unrelated|>"
CHATML_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def ends(checkpoint: Checkpoint) -> list[str]:
    """The texts of the tokens that end answers."""
    texts = {each["id"]: each["content"] for each in checkpoint.description["added_tokens"]}
    found = with_implied_end(checkpoint, PromptLimitsConfig())
    return [texts[each] for each in found.eos_token_ids]


def renamed(folder: Path, end: str) -> Path:
    """The same checkpoint with another end in its files."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token": end}))
    return folder


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_a_template_that_writes_a_named_end_implies_no_other(family: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(make(family, tmp_path))
    _, *implied = ends(checkpoint)
    # Two of these name what pretraining ended documents with; a turn of GLM ends where another one begins.
    assert implied == {"gemma": ["<end_of_turn>"], "glm": ["<|user|>"], "glm47": ["<|user|>"]}.get(family, [])


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("chatml", "<|im_end|>"),
        ("qwen_tools", "<|im_end|>"),
        ("qwen_xml", "<|im_end|>"),
        ("kimi", "<|im_end|>"),
        ("llama3", "<|eot_id|>"),
        ("phi4", "<|end|>"),
        ("granite", "<|end_of_text|>"),
        ("llama4", "<|eot|>"),
    ],
)
def test_what_the_template_writes_behind_a_turn_ends_answers_too(
    family: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make(family, tmp_path)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    last = max(each["id"] for each in tokenizer["added_tokens"])
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": last + 1, "content": OTHER})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with caplog.at_level(logging.WARNING):
        assert ends(load_checkpoint(renamed(folder, OTHER))) == [OTHER, expected]
    assert f"{expected} (id " in caplog.text
    assert "ends them, too" in caplog.text


def test_a_checkpoint_that_names_no_end_at_all_gets_the_templates(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level(CHATML), CHATML_TEMPLATE)
    assert ends(load_checkpoint(folder)) == ["<|im_end|>"]


@pytest.mark.parametrize(
    "template",
    [
        "",
        # Turns end as they begin.
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{{ raise_exception('no') }}",
        # The turns of assistants are not written.
        "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}",
    ],
)
def test_where_nothing_is_implied_nothing_is_added(template: str, tmp_path: Path) -> None:
    assert ends(load_checkpoint(write(tmp_path, byte_level(CHATML), template))) == []


def test_a_mark_of_thoughts_or_calls_is_no_end(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}</think>{% endfor %}"
    assert ends(load_checkpoint(write(tmp_path, byte_level(CHATML, ("</think>",)), template))) == []
