"""A request's tokens and log-probabilities, bit for bit, whatever else is in the batch and however it was
chunked.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.runner.runner import ModelRunner
from engine.types import SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

GREEDY = SamplingParams(temperature=0.0, logprobs=3)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=12345, logprobs=3)
PENALIZED = SamplingParams(temperature=0.7, seed=5, presence_penalty=0.5, repetition_penalty=1.3, logprobs=0)
KINDS = [GREEDY, SEEDED, PENALIZED]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8 cache", "mixed cache"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    folder = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(folder, "qwen3", head_dim=24, max_position_embeddings=1024)
    if request.param == "int8 cache":
        runner = open_runner(folder, cache={"kv_dtype": "int8"})
    elif request.param == "mixed cache":
        runner = open_runner(folder, cache={"kv_dtype": "fp8", "kv_dtype_layers": {"0": "int8"}})
    else:
        runner = open_runner(folder, dtype=request.param)
    yield runner
    runner.close()


def jobs_for(num_jobs: int, chunk: int) -> list[Job]:
    """Prompts of many lengths, greedy and sampled."""
    lengths = [3 + (index * 37) % 290 for index in range(num_jobs)]
    return [
        Job(prompt_of(length, 199, seed=index), num_tokens=12, sampling=KINDS[index % 3], chunk=chunk)
        for index, length in enumerate(lengths)
    ]


def test_alone_among_others_and_in_chunks(runner: ModelRunner) -> None:
    driver = Driver(runner, seed=1)
    alone = [driver.run([job])[0] for job in jobs_for(32, chunk=1 << 30)]
    together = driver.run(jobs_for(32, chunk=1 << 30))
    chunked = driver.run(jobs_for(32, chunk=23))
    for one, crowd, pieces in zip(alone, together, chunked, strict=True):
        assert one.output == crowd.output == pieces.output
        assert one.logprobs == crowd.logprobs == pieces.logprobs


def test_after_a_prefix_hit(runner: ModelRunner) -> None:
    """Blocks that another sequence computed serve a later one."""
    driver = Driver(runner, seed=2)
    shared = prompt_of(64, 199, seed=7)
    prompts = [shared + prompt_of(30 + index, 199, seed=index) for index in range(5)]
    cold = [driver.run([Job(prompt, sampling=SEEDED)])[0] for prompt in prompts]
    blocks = driver.take_blocks(64)
    warm_up = Driver(runner, seed=2)
    warm_up._free = []
    warm_up.run([Job(shared, num_tokens=1, sampling=GREEDY)], prefix=(blocks + driver.take_blocks(64), 0))
    warm = driver.run([Job(prompt, sampling=SEEDED) for prompt in prompts], prefix=(blocks, 64))
    for before, after in zip(cold, warm, strict=True):
        assert before.output == after.output
        assert before.logprobs == after.logprobs


def test_recompute_after_preemption(runner: ModelRunner) -> None:
    """Outputs known already are computed as prompt; the noise continues at the right position."""
    driver = Driver(runner, seed=3)
    for sampling in KINDS:
        prompt = prompt_of(50, 199, seed=9)
        (whole,) = driver.run([Job(prompt, num_tokens=20, sampling=sampling)])
        resumed = Job(prompt, num_tokens=20, sampling=sampling, output=whole.output[:9])
        (resumed,) = driver.run([resumed])
        assert resumed.output == whole.output
        assert resumed.logprobs == whole.logprobs[9:]


def test_choices_and_seeds_draw_differently(runner: ModelRunner) -> None:
    driver = Driver(runner, seed=4)
    prompt = prompt_of(20, 199)
    hot = SamplingParams(temperature=1.5, seed=1)
    other = SamplingParams(temperature=1.5, seed=2)
    jobs = driver.run(
        [
            Job(prompt, sampling=hot, choice=0),
            Job(prompt, sampling=hot, choice=1),
            Job(prompt, sampling=other),
        ]
    )
    again = driver.run([Job(prompt, sampling=hot, choice=1)])
    assert len({tuple(job.output) for job in jobs}) == 3
    assert again[0].output == jobs[1].output
