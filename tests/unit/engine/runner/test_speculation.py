"""Speculation changes how many steps an output takes, and never the output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.runner import ModelRunner
from engine.runner.speculation.ngram import continuation
from engine.speculation_config import SpeculationConfig
from engine.types import SamplingParams
from tests.unit.engine.checkpoints import reference_logits
from tests.unit.engine.runner.drafting import BUNDLED, GRAMMAR, SAMPLINGS
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner, prompt_of


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


@pytest.fixture(scope="module", params=["ngram", "suffix", "draft_model", "lookahead"])
def runner(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelRunner]:
    """The draft model is a noisy copy of the target: often right, not always."""
    draft = tmp_path_factory.mktemp("draft")
    with torch.no_grad():
        noisy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(5)
        for parameter in noisy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        noisy.save_pretrained(draft)
    speculation = SpeculationConfig(
        method=request.param, draft_model=str(draft), min_ngram=1, min_acceptance=0.0
    )
    runner = open_runner(folder, speculation=speculation, cache={"block_size": 4}, kv_cache_bytes=64 << 20)
    yield runner
    runner.close()


def jobs_of(speculate: bool) -> list[Job]:
    """Prompts that repeat themselves, so that prompt lookup finds something, under every kind of sampling."""
    return [
        Job(
            prompt_of(9, 199, seed=index) * 4,
            num_tokens=30,
            sampling=SAMPLINGS[index % 3],
            chunk=17,
            speculate=speculate,
        )
        for index in range(9)
    ]


def test_output_is_the_same_with_and_without(runner: ModelRunner) -> None:
    plain = Driver(runner, seed=1).run(jobs_of(speculate=False))
    drafted = Driver(runner, seed=2).run(jobs_of(speculate=True))
    for one, other in zip(plain, drafted, strict=True):
        assert other.output[:30] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    assert sum(job.num_drafted for job in drafted) > 0
    assert sum(job.num_steps for job in drafted) < sum(job.num_steps for job in plain)


@pytest.mark.parametrize("cache", [{}, {"kv_dtype": "kivi4", "block_size": 64}], ids=["auto", "kivi4"])
def test_draft_model_agrees_with_itself(folder: Path, cache: dict[str, Any]) -> None:
    """The target as its own draft: nearly every draft is accepted, sampled ones included, so the draws are
    coupled; and what it keeps of its keys has the bits of the target's, beyond the end of a block.
    """
    jobs = generated(
        folder,
        [replace(job, num_tokens=45) for job in jobs_of(speculate=True)],
        speculation=SpeculationConfig(method="draft_model", draft_model=str(folder), min_acceptance=0.0),
        cache=cache,
    )
    drafted, accepted = sum(job.num_drafted for job in jobs), sum(job.num_accepted for job in jobs)
    assert drafted > 100
    assert accepted == drafted


def test_distribution_with_drafts_is_exact(
    runner: ModelRunner, target_oracle: transformers.PreTrainedModel
) -> None:
    """Two tokens drawn with drafts for both, over many seeds, against the product of the exact softmaxes."""
    few, prompt, num_seeds = (3, 50, 120, 7), prompt_of(5, 199, seed=8), 2400
    jobs = [
        Job(
            prompt,
            num_tokens=2,
            sampling=SamplingParams(temperature=3.0, seed=seed, allowed_token_ids=few),
            drafts={0: (few[0], few[1])},
        )
        for seed in range(num_seeds)
    ]
    counts = np.zeros((4, 4))
    for start in range(0, num_seeds, 400):
        for job in Driver(runner).run(jobs[start : start + 400]):
            counts[few.index(job.output[0]), few.index(job.output[1])] += 1

    def exact(context: list[int]) -> np.ndarray:
        row = reference_logits(target_oracle, context)[-1][torch.tensor(few)].double() / 3.0
        return torch.softmax(row, -1).numpy()

    first = exact(prompt)
    joint = np.stack([first[index] * exact([*prompt, few[index]]) for index in range(4)])
    expected = num_seeds * joint
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 15) / math.sqrt(2 * 15) < 5
    assert sum(job.num_accepted for job in jobs) > 0


def test_guided_decoding_with_drafts_and_forced_tokens() -> None:
    """The grammar forces keys: they come in one step each, and the output is that of plain decoding."""
    prompt = prompt_of(10, 2000)
    outputs = []
    for method in ("off", "ngram", "suffix", "draft_model"):
        speculation = SpeculationConfig(method=method, draft_model=str(BUNDLED), min_acceptance=0.0)
        with closing(open_runner(BUNDLED, speculation=speculation, max_model_len=1024)) as runner:
            driver = Driver(runner)
            for speculate in (False, True):
                jobs = [
                    Job(prompt, num_tokens=60, sampling=sampling, grammar=GRAMMAR, speculate=speculate)
                    for sampling in SAMPLINGS
                ]
                done = driver.run(jobs)
                outputs.append([job.output for job in done])
                assert all(job.grammar_finished for job in done)
                if speculate:
                    assert sum(job.num_steps for job in done) < 0.8 * sum(len(job.output) for job in done)
    assert all(found == outputs[0] for found in outputs)


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 5),
    shortest=st.integers(1, 3),
    num_drafts=st.integers(1, 6),
)
def test_prompt_lookup_finds_what_brute_force_finds(
    tokens: list[int], longest: int, shortest: int, num_drafts: int
) -> None:
    expected: tuple[int, ...] = ()
    for size in range(longest, shortest - 1, -1):
        starts = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[-size:]]
        if starts and size < len(tokens):
            expected = tuple(tokens[starts[-1] + size : starts[-1] + size + num_drafts])
            break
    found = continuation(np.array(tokens), longest=longest, shortest=shortest, num_drafts=num_drafts)
    assert found == expected
