"""A checkpoint computes what transformers computes, in every situation that a sequence gets into."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import SchedulerConfig
from tests.unit.engine.checkpoints import reference_greedy, reference_logits
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, open_runner, prompt_of

# So small that layers with a window do not keep everything, where others do.
STEPS = SchedulerConfig(max_num_batched_tokens=64)
TORCH = ({"attention_backend": "torch"}, 13)
# Options of a runner, and tokens of a prompt's chunks.
WAYS: tuple[tuple[dict[str, Any], int], ...] = (
    ({"native": "required"}, 13),
    TORCH,
    ({"attention_backend": "reference"}, 1000),
)


def assert_equals_transformers(
    folder: Path, oracle: transformers.PreTrainedModel, ways: tuple[tuple[dict[str, Any], int], ...] = WAYS
) -> None:
    """Logits and greedy answers: of chunked prompts, among others, after hits of prefixes, preempted."""
    prompts = [prompt_of(length, 199, seed=length) for length in (45, 1, 17)]
    for options, chunk in ways:
        with closing(open_runner(folder, scheduler=STEPS, **options)) as runner:
            probe = GREEDY.__class__(temperature=0.0, prompt_logprobs=199)
            driver = Driver(runner, seed=3)
            scored, *_ = driver.run([Job(prompts[0], num_tokens=1, sampling=probe, chunk=chunk)])
            _assert_scores(scored, torch.log_softmax(reference_logits(oracle, prompts[0]), -1))
            jobs = driver.run([Job(prompt, num_tokens=8, chunk=chunk) for prompt in prompts])
            _assert_continues(driver, jobs[0])
        for job in jobs:
            assert job.output == reference_greedy(oracle, job.prompt, 8, job.output)


def _assert_continues(driver: Driver, known: Job) -> None:
    """The rest of its output comes again after a hit of its prompt's first blocks, and once the sequence was
    preempted, as its output is computed as prompt then.
    """
    (resumed,) = driver.run([Job(known.prompt, num_tokens=8, output=known.output[:5], chunk=11)])
    blocks, state = driver.take_blocks(32), driver.take_state()
    copies = {32: state} if state >= 0 else {}
    driver.run([Job(known.prompt[:32], num_tokens=1, copies=copies)], prefix=(blocks, 0))
    (hit,) = driver.run([Job(known.prompt, num_tokens=8)], prefix=(blocks, 32), state=state)
    assert resumed.output == hit.output == known.output


def _assert_scores(job: Job, expected: torch.Tensor) -> None:
    """Every log-probability of every prompt position equals the oracle's to 1e-4."""
    assert len(job.prompt_logprobs) == len(job.prompt) - 1
    for position, entry in enumerate(job.prompt_logprobs):
        ours = torch.full((expected.shape[1],), float("nan"))
        ours[torch.tensor(entry.top_ids)] = torch.tensor(entry.top_logprobs)
        torch.testing.assert_close(ours, expected[position], atol=1e-4, rtol=0)
        assert entry.token_id == job.prompt[position + 1]
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=1e-4)
