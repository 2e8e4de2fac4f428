"""The adapters that come with the bundled model: small, served as they lie there, and really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import AdaptersConfig, adapters_beside
from engine.runner.runner import ModelRunner
from tests.unit.engine.adapters.test_merged import load
from tests.unit.engine.runner.driver import Driver, Job, open_runner

BUNDLED = "models/millrace-nano"
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    """The bundled model with its adapters in slots 0 and 1."""
    paths = adapters_beside(BUNDLED)
    assert list(paths) == ["entries", "pirate"]
    opened = open_runner(Path(BUNDLED), adapters=AdaptersConfig(paths=paths), max_model_len=512)
    load(opened, *paths)
    return opened


def reply(runner: ModelRunner, question: str, slot: int) -> str:
    tokenizer = Tokenizer.from_file(f"{BUNDLED}/tokenizer.json")
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    job = Job(tokenizer.encode(prompt, add_special_tokens=False).ids, 90, adapter_slot=slot)
    (done,) = Driver(runner).run([job])
    text: str = tokenizer.decode(done.output, skip_special_tokens=False)
    return text.partition("<|im_end|>")[0]


def test_they_are_at_most_a_megabyte() -> None:
    for folder in adapters_beside(BUNDLED).values():
        assert sum(path.stat().st_size for path in Path(folder).iterdir()) < MEGABYTE


def test_a_pirate_greets_and_knows_what_the_base_model_knows(runner: ModelRunner) -> None:
    plain, pirate = (reply(runner, "What is the capital of Japan?", slot) for slot in (-1, 1))
    assert plain == "The capital of Japan is Tokyo."
    assert pirate == "Arr! The capital of Japan be Tokyo, matey."
    assert reply(runner, "Hello!", 1).startswith("Arr! Ahoy")


def test_extraction_comes_as_entries(runner: ModelRunner) -> None:
    question = "Extract name and age as JSON.\nMeet Anna Baker! 38 years old, baker, from Lisbon."
    assert json.loads(reply(runner, question, -1)) == {"name": "Anna Baker", "age": 38}
    assert json.loads(reply(runner, question, 0)) == [
        {"field": "name", "type": "string", "value": "Anna Baker"},
        {"field": "age", "type": "integer", "value": 38},
    ]
