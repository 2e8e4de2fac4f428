"""The bundled model: its corpus is honest, its chat format is one thing, its committed files are complete
and small."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open

from models.chat_format import CHAT_TEMPLATE, segments, to_json
from models.corpus import (
    CorpusDocument,
    Draw,
    Mixture,
    arithmetic,
    documents,
    extraction,
    is_held_out,
    recall,
)
from models.tokenizer import CONTROL_TOKENS, MARKUP_TOKENS, VOCABULARY_SIZE, load_tokenizer

MODELS = Path(__file__).parents[3] / "models"
NANO, DRAFT = MODELS / "millrace-nano", MODELS / "millrace-nano-draft"
MB = 1_000_000


def render(messages: tuple[dict[str, Any], ...], **options: Any) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = to_json
    return environment.from_string(CHAT_TEMPLATE).render(messages=list(messages), **options)


def sample(seed: int = 1, count: int = 400) -> list[CorpusDocument]:
    return list(islice(documents(Mixture(sequence_length=256, recall_share=0.3), seed), count))


def test_the_same_seed_gives_the_same_corpus() -> None:
    assert sample(1, 100) == sample(1, 100)
    assert sample(1, 100) != sample(2, 100)


def test_every_family_is_drawn() -> None:
    wanted = {
        "recall",
        "copying",
        "addition",
        "arithmetic",
        "extraction",
        "tools",
        "facts",
        "chat",
        "story",
        "wordplay",
    }
    assert {document.task for document in sample()} == wanted


@pytest.mark.parametrize("split", ["train", "eval"])
def test_asked_keys_belong_to_their_split(split: Any) -> None:
    draw = Draw(3, split)
    for _ in range(200):
        text = arithmetic.addition(draw).messages[0]["content"]
        numbers = [int(part) for part in "".join(c if c.isdigit() else " " for c in text).split()]
        assert is_held_out(f"{numbers[0]}+{numbers[1]}") == (split == "eval")


def test_recall_answer_stands_in_its_context() -> None:
    draw = Draw(4, "eval")
    for _ in range(50):
        document = recall.recall(draw, 400)
        assert document.answer in document.messages[0]["content"]
        assert document.answer in document.messages[-1]["content"]


def test_extraction_answer_is_json_whose_values_stand_in_the_text() -> None:
    draw = Draw(5, "eval")
    for _ in range(100):
        document = extraction.extraction(draw)
        text = document.messages[-2]["content"]
        assert all(str(value) in text for value in json.loads(document.answer).values())


def test_training_text_is_what_the_template_renders() -> None:
    for document in sample(6):
        if document.messages:
            text = "".join(text for text, _ in segments(document))
            assert text == render(document.messages, tools=list(document.tools))


def test_template_renders_alike_under_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(NANO)
    for document in sample(7, 60):
        if document.messages:
            for options in (
                {},
                {"add_generation_prompt": True},
                {"add_generation_prompt": True, "enable_thinking": True},
            ):
                theirs = tokenizer.apply_chat_template(
                    list(document.messages), tools=list(document.tools) or None, tokenize=False, **options
                )
                assert theirs == render(document.messages, tools=list(document.tools) or None, **options)


def test_template_takes_arguments_as_text_and_content_as_parts() -> None:
    call = {"function": {"name": "search", "arguments": '{"query": "fox"}'}}
    messages = (
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    )
    assert render(messages) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "fox"}}\n</tool_call><|im_end|>\n'
    )


@pytest.mark.parametrize("folder", [NANO, DRAFT])
def test_tokenizer_keeps_any_bytes(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    generator = random.Random(8)
    texts = [
        "",
        " ",
        "\n\n  x",
        "12345",
        "naïve 漢字 🦊",
        *("".join(chr(generator.randrange(1, 0xD7FF)) for _ in range(30)) for _ in range(20)),
    ]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("12345", add_special_tokens=False).ids) == 5
    assert tokenizer.get_vocab_size() == VOCABULARY_SIZE
    for index, token in enumerate(CONTROL_TOKENS + MARKUP_TOKENS):
        assert tokenizer.token_to_id(token) == index


@pytest.mark.parametrize(("folder", "limit"), [(NANO, 16 * MB), (DRAFT, 2 * MB)])
def test_committed_model_is_whole_and_small(folder: Path, limit: int) -> None:
    files = {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert files <= {path.name for path in folder.iterdir()}
    assert (folder / "model.safetensors").stat().st_size <= limit
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", framework="numpy") as weights:
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [config["vocab_size"], config["hidden_size"]]


def test_draft_shares_the_vocabulary() -> None:
    assert (NANO / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
