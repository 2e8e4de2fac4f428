"""Quantized keys and values: the engine's outputs stay near, natively and by torch, and rows do not depend on
the batch.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from engine.model.native_decoder import NativeDecoder
from engine.types import SamplingParams, SchedulerOutput
from kernels.paged_cache.host import BY_CHANNEL, KEY_GROUP
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_plan import LATENT_SIZES
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.test_moved_forms import BYTES

SCORING = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=1)
BUNDLED = Path("models/millrace-nano")
# How much of a log-probability a form may cost on average, of random models with large weights.
COSTS = {"int8": 0.05, "fp8": 0.15, "kivi4": 0.3}
# The same of the bundled model, in nats of a token's log-probability over whole texts.
BUNDLED_COSTS = {"int8": 0.002, "fp8": 0.005, "kivi4": 0.02}


def cache_of(kind: str) -> dict[str, object]:
    """`[engine.cache]` of this form, in its smallest blocks."""
    return {"kv_dtype": kind} | ({"block_size": KEY_GROUP} if kind == BY_CHANNEL else {})


def scored(folder: Path, native: str, prompt: list[int], cache: dict[str, object]) -> list[float]:
    """Log-probabilities of a prompt's tokens, which are the same whatever is beside it."""
    with closing(open_runner(folder, native=native, cache=cache)) as runner:
        assert isinstance(runner.model, NativeDecoder) == (native == "required")
        (alone,) = Driver(runner).run([Job(prompt, sampling=SCORING)])
        others = [Job(prompt_of(size, 199, seed=size)) for size in (3, 30, 70)]
        among, *_ = Driver(runner, seed=5).run([Job(prompt, chunk=9, sampling=SCORING), *others])
    assert among.output == alone.output
    assert [entry.logprob for entry in among.prompt_logprobs] == [
        each.logprob for each in alone.prompt_logprobs
    ]
    return [entry.logprob for entry in alone.prompt_logprobs]


def mean_difference(some: list[float], others: list[float]) -> float:
    return float(np.abs(np.subtract(some, others)).mean())


@pytest.mark.parametrize("native", ["required", "off"])
@pytest.mark.parametrize("kind", COSTS)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {"head_dim": 16}),
        ("qwen3", {"head_dim": 24}),
        ("gemma2", {"head_dim": 32}),
        ("deepseek_v3", LATENT_SIZES),
    ],
)
def test_outputs_stay_near(
    model_type: str, changes: dict[str, object], kind: str, native: str, tmp_path: Path
) -> None:
    if kind == BY_CHANNEL and (model_type == "deepseek_v3" or changes["head_dim"] == 24):
        pytest.skip("refused, as test_plan shows")
    make_checkpoint(tmp_path, model_type, **changes)
    prompt = prompt_of(100, 199)
    exact, found = (scored(tmp_path, native, prompt, cache_of(each)) for each in ("float32", kind))
    assert 0 < mean_difference(exact, found) < COSTS[kind]


@pytest.mark.parametrize("kind", ["fp8", "kivi4"])
def test_native_kernels_read_what_torch_reads(kind: str, tmp_path: Path) -> None:
    """Few elements are between two levels, and rounded to either."""
    make_checkpoint(tmp_path, "llama", head_dim=16)
    prompt = prompt_of(100, 199)
    ours, theirs = (scored(tmp_path, native, prompt, cache_of(kind)) for native in ("required", "off"))
    assert mean_difference(ours, theirs) < COSTS[kind] / 5


@pytest.mark.parametrize("kind", BUNDLED_COSTS)
def test_the_bundled_model_loses_little(kind: str) -> None:
    """What it says of 600 tokens that it makes itself: the mean of their log-probabilities."""
    with closing(open_runner(BUNDLED, native="required")) as runner:
        (told,) = Driver(runner).run([Job(prompt_of(8, 2048, seed=2), num_tokens=600)])
    text = told.prompt + told.output
    means = []
    for each in ("float32", kind):
        with closing(open_runner(BUNDLED, native="required", cache=cache_of(each))) as runner:
            (job,) = Driver(runner).run([Job(text, num_tokens=1, sampling=SCORING, chunk=128)])
        means.append(np.mean([entry.logprob for entry in job.prompt_logprobs]))
    assert abs(means[1] - means[0]) < BUNDLED_COSTS[kind]


@pytest.mark.parametrize("native", ["required", "off"])
@pytest.mark.parametrize("kind", COSTS)
def test_blocks_go_to_host_memory_and_back(kind: str, native: str, tmp_path: Path) -> None:
    """Bytes are all that a block is: what comes back elsewhere gives the same answer."""
    make_checkpoint(tmp_path, "llama", head_dim=16)
    cache = cache_of(kind) | {"host_bytes": 1 << 20}
    with closing(open_runner(tmp_path, native=native, cache=cache)) as runner:
        driver, storage = Driver(runner), runner.storage
        driver.run([Job(prompt_of(40, 199))])
        parts = [part for layer in storage.layers for part in layer.tensors()]
        tensors = [np.asarray(part.view(BYTES[type(part)])) for part in parts]
        contents = [part[:2].copy() for part in tensors]
        driver.step(SchedulerOutput(step_id=1, offloads=((0, 0), (1, 1))))
        for part in tensors:
            part[:2] = 0
        driver.step(SchedulerOutput(step_id=2, restores=((1, 0), (0, 1))))
        for part, before in zip(tensors, contents, strict=True):
            assert part[:2].tobytes() == before[::-1].tobytes()
