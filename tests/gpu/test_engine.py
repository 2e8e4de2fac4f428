"""The engine on the device: tokens of transformers, offload under load, memory that runs out."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import ScheduledSequence, SchedulerOutput
from kernels.config import KernelsConfig
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.gpu.conftest import REHEARSES
from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, new_sequence, open_runner, prompt_of

FAMILIES = (
    ["llama"]
    if REHEARSES
    else ["llama", "qwen3-biases", "gemma2", "gemma3", "mixtral", "gpt-oss", "deepseek-v3"]
)
KNOWN = [name for name in FAMILIES if name in CASES]


def opened(folder: Path, **options: Any) -> ModelRunner:
    """A runner on the device; a rehearsal has the torch path of the CPU instead."""
    place = {"device": "cpu", "native": "off"} if REHEARSES else {"device": "cuda"}
    return open_runner(folder, **(place | options))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KNOWN)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    oracle = make_checkpoint(tmp_path, model_type, **changes)
    prompts = [prompt_of(length, 199, seed=length) for length in (45, 1, 17)]
    expected = [reference_greedy(oracle, prompt, 8) for prompt in prompts]
    with closing(opened(tmp_path)) as runner:
        for chunk in (13, 1000):
            jobs = Driver(runner, seed=3).run([Job(prompt, chunk=chunk) for prompt in prompts])
            assert [job.output for job in jobs] == expected


@pytest.mark.timeout(300)
def test_draws_and_scores_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """Bit for bit, with products that leave nothing to libraries."""
    make_checkpoint(tmp_path, "llama")
    with closing(
        opened(tmp_path, **({} if REHEARSES else {"kernels": KernelsConfig(linear="invariant")}))
    ) as runner:
        sampling = GREEDY.__class__(temperature=0.9, top_p=0.9, seed=7, logprobs=2)
        jobs = [Job(prompt_of(5 + 9 * index, 199, seed=index), sampling=sampling) for index in range(7)]
        together = [(job.output, job.logprobs) for job in Driver(runner).run(jobs)]
        for index, output in enumerate(together):
            (alone,) = Driver(runner, seed=index).run(
                [Job(prompt_of(5 + 9 * index, 199, seed=index), sampling=sampling)]
            )
            assert (alone.output, alone.logprobs) == output


@pytest.mark.timeout(300)
def test_histories_survive_offload_under_load(tmp_path: Path) -> None:
    """Sequences decode while blocks of others leave, are overwritten, and come back elsewhere."""
    oracle = make_checkpoint(tmp_path, "llama")
    per_block = 2 * 2 * 2 * 12 * 4 * 16
    cache = {"host_bytes": 40 * per_block}
    runner = opened(tmp_path, cache=cache)
    chance = random.Random(5)
    with closing(runner):
        driver = Driver(runner)
        kept = {index: prompt_of(32, 199, seed=100 + index) for index in range(1, 6)}
        homes = {index: driver.take_blocks(32) for index in kept}
        for index, prompt in kept.items():
            first = ScheduledSequence(index, 0, 32, (), True)
            driver.step(SchedulerOutput(index, (new_sequence(index, Job(prompt), homes[index]),), (first,)))
        step_id, host = 100, 0
        for index, blocks in homes.items():
            step_id += 1
            driver.step(
                SchedulerOutput(
                    step_id, offloads=tuple(zip(blocks, (host, host + 1), strict=True)), released=(index,)
                )
            )
            host += 2
        used = [block for blocks in homes.values() for block in blocks]
        for tensor in (tensor for layer in runner.storage.layers for tensor in layer.tensors()):
            tensor[used] = float("nan")
        for index in chance.sample(sorted(kept), len(kept)):
            step_id += 1
            elsewhere = driver.take_blocks(48)
            first_row = 2 * (index - 1)
            known = [*kept[index], *reference_greedy(oracle, kept[index], 1)]
            plan = SchedulerOutput(
                step_id,
                (new_sequence(index + 50, Job(known), elsewhere),),
                (ScheduledSequence(index + 50, 32, 1, (), True),),
                restores=((first_row, elsewhere[0]), (first_row + 1, elsewhere[1])),
            )
            (result,) = driver.step(plan).results
            assert result.token_ids == (reference_greedy(oracle, known, 1)[0],)


def test_a_cache_that_cannot_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    config = EngineConfig(
        device="cpu" if REHEARSES else "cuda", native="off", cache=CacheConfig(kv_cache_bytes=1 << 50)
    )
    with pytest.raises(ConfigError, match=r"kv_cache_bytes = .* left of"):
        build_here(config, ModelConfig(path=str(tmp_path)), lambda phase, part: None)


@pytest.mark.timeout(300)
@pytest.mark.skipif(REHEARSES, reason="memory of the host is not taken away")
def test_a_device_without_memory_fails_steps_and_recovers(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    runner = opened(tmp_path)
    try:
        prompt = prompt_of(300, 199)
        driver = Driver(runner)
        blocks = driver.take_blocks(320)
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        # This process alone runs out of memory: others may be testing on the device.
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / total)
        first = ScheduledSequence(1, 0, 300, (), True)
        plan = SchedulerOutput(0, (new_sequence(1, Job(prompt), blocks),), (first,))
        try:
            failed = bool(runner.launch(plan).wait().failure)
        except Exception:
            failed = True
        torch.cuda.set_per_process_memory_fraction(1.0)
        again = driver.take_blocks(320)
        retry = SchedulerOutput(
            1,
            (new_sequence(2, Job(prompt), again),),
            (ScheduledSequence(2, 0, 300, (), True),),
            released=(1,),
        )
        (result,) = driver.step(retry).results
        assert result.token_ids == tuple(reference_greedy(oracle, prompt, 1))
        print("the starved step", "failed alone" if failed else "had what it needed already")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        runner.close()
