"""Keys rounded by channel: answers do not depend on how they came about, the plan counts what they take, and
what does not go with them is refused by name.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig
from engine.model.kv_memory import kv_bytes_per_token, recent_bytes
from engine.model.plan import make_plan, plan_input
from engine.runner.build import build_here
from engine.types import SamplingParams
from kernels.paged_cache.host import KEY_GROUP
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_plan import GIB, LATENT_SIZES
from tests.unit.engine.quantization.test_kv import mean_difference
from tests.unit.engine.quantization.test_kv_layers import GEMMA4, SHARED
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.test_batch_invariance import GREEDY, KINDS, SEEDED
from tests.unit.engine.runner.test_window import generate

CACHE: dict[str, Any] = {"kv_dtype": "kivi4", "block_size": KEY_GROUP}
SCORING = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qwen3")
    make_checkpoint(place, "qwen3", head_dim=32, max_position_embeddings=1024)
    return place


@pytest.fixture(params=["required", "off"])
def native(request: pytest.FixtureRequest) -> str:
    """Whether the native kernels compute, or torch."""
    return str(request.param)


def drivers(folder: Path, **options: Any) -> Any:
    return closing(open_runner(folder, cache=CACHE, **options))


def test_answers_alone_among_others_in_chunks_and_resumed(folder: Path, native: str) -> None:
    lengths = [3 + (index * 37) % 290 for index in range(16)]
    jobs = [
        Job(prompt_of(length, 199, seed=index), num_tokens=70, sampling=KINDS[index % 3])
        for index, length in enumerate(lengths)
    ]
    with drivers(folder, native=native) as runner:
        driver = Driver(runner, seed=1)
        alone = [driver.run([replace(job, output=[], logprobs=[])])[0] for job in jobs]
        for changed in (
            jobs,
            [replace(job, chunk=23) for job in jobs],
            # As after a preemption: known answers are computed as prompts.
            [replace(job, output=one.output[:33]) for job, one in zip(jobs, alone, strict=True)],
        ):
            copies = [replace(job, output=list(job.output), logprobs=[]) for job in changed]
            starts = [len(job.output) for job in copies]
            for one, start, found in zip(alone, starts, driver.run(copies), strict=True):
                assert found.output == one.output
                assert found.logprobs == one.logprobs[start:]


def test_answers_after_a_prefix_hit(folder: Path, native: str) -> None:
    shared = prompt_of(2 * KEY_GROUP, 199, seed=7)
    prompts = [shared + prompt_of(30 + index, 199, seed=index) for index in range(3)]
    with drivers(folder, native=native) as runner:
        driver = Driver(runner, seed=2)
        cold = [driver.run([Job(prompt, sampling=SEEDED)])[0] for prompt in prompts]
        blocks = driver.take_blocks(len(shared))
        warm_up = Driver(runner, seed=2)
        warm_up._free = []
        first = Job(shared, num_tokens=1, sampling=GREEDY)
        warm_up.run([first], prefix=(blocks + driver.take_blocks(KEY_GROUP), 0))
        warm = driver.run([Job(prompt, sampling=SEEDED) for prompt in prompts], prefix=(blocks, len(shared)))
    for before, after in zip(cold, warm, strict=True):
        assert before.output == after.output
        assert before.logprobs == after.logprobs


@pytest.mark.parametrize("length", [30, KEY_GROUP - 2, KEY_GROUP])
def test_drafts_change_no_answer(folder: Path, length: int, native: str) -> None:
    """Right ones and wrong ones, within a block and beyond its end."""
    with drivers(folder, native=native) as runner:
        driver = Driver(runner)
        prompt = prompt_of(length, 199, seed=3)
        (plain,) = driver.run([Job(prompt, num_tokens=2 * KEY_GROUP, sampling=GREEDY)])
        drafts = {}
        for at in range(1, 2 * KEY_GROUP - 6):
            guess = plain.output[at : at + 4]
            guess[at % 5 % len(guess) :] = [7] * (4 - at % 5 % len(guess))
            drafts[at] = tuple(guess)
        (drafted,) = driver.run([Job(prompt, num_tokens=2 * KEY_GROUP, sampling=GREEDY, drafts=drafts)])
    assert drafted.num_accepted > 0
    assert drafted.num_accepted < drafted.num_drafted
    assert drafted.output == plain.output
    assert drafted.logprobs == plain.logprobs


@pytest.mark.parametrize("asked", [{}, {"n": 2}, {"n": 2, "beams": 2}])
def test_preempted_and_forked_answers_through_the_scheduler(
    folder: Path, asked: dict[str, int], native: str
) -> None:
    """With few blocks, some of which come back from the host, as with all the room there is."""

    def answered(num_blocks: int, host_blocks: int) -> tuple[dict[tuple[int, int], list[int]], int]:
        cache = CACHE | {"host_bytes": host_blocks * per_block}
        with closing(
            open_runner(folder, native=native, cache=cache, kv_cache_bytes=num_blocks * per_block)
        ) as runner:
            assert runner.storage.num_blocks == num_blocks
            room: dict[str, Any] = {"prefix_caching": host_blocks > 0, "num_host_blocks": host_blocks} | asked
            tokens, preemptions, _ = generate(runner, window=None, kv_dtype="kivi4", **room)
        return tokens, preemptions.total()

    config = EngineConfig(cache=CacheConfig(**CACHE), dtype="float32")
    given = plan_input(config, ModelConfig(path=str(folder)), device="cpu", available_bytes=GIB)
    per_block = KEY_GROUP * make_plan(given).kv_bytes_per_token
    expected, _ = answered(100, 0)
    found, num_preempted = answered(16 if not asked else 24, 20)
    assert found == expected
    assert asked or num_preempted > 0


def test_some_layers_alone(folder: Path, native: str) -> None:
    cache = {"block_size": KEY_GROUP, "kv_dtype": "int8", "kv_dtype_layers": {"1": "kivi4"}}
    with closing(open_runner(folder, native=native, cache=cache)) as runner:
        eight, four = runner.storage.layers[:2]
        assert (eight.type_name, four.type_name) == ("int8", "kivi4")
        (job,) = Driver(runner).run([Job(prompt_of(100, 199), num_tokens=40)])
        (again,) = Driver(runner, seed=4).run([Job(prompt_of(100, 199), num_tokens=40, chunk=9)])
    assert job.output == again.output


def test_layers_that_read_the_keys_of_others(tmp_path: Path, native: str) -> None:
    """In steps that are longer than what is kept of keys, and shorter ones; some layers have a window."""
    sizes = {"head_dim": 32, "global_head_dim": 32, "max_position_embeddings": 512}
    make_checkpoint(tmp_path, "gemma4_text", **GEMMA4 | SHARED | sizes)
    prompt, found = prompt_of(400, 199, seed=1), []
    for seed, chunk in enumerate((400, 9, 150)):
        with closing(open_runner(tmp_path, native=native, cache=CACHE)) as runner:
            assert len({id(layer) for layer in runner.storage.layers}) < len(runner.storage.layers)
            job = Job(prompt, num_tokens=70, sampling=GREEDY, chunk=chunk)
            found.append(Driver(runner, seed=seed).run([job])[0])
    for one in found[1:]:
        assert one.output == found[0].output
        assert one.logprobs == found[0].logprobs
    said = []
    for cache in ({"kv_dtype": "float32"}, {"kv_dtype": "fp8"}, CACHE):
        with closing(open_runner(tmp_path, native=native, cache=cache)) as runner:
            (job,) = Driver(runner).run([Job(prompt, num_tokens=1, sampling=SCORING, chunk=100)])
        said.append([entry.logprob for entry in job.prompt_logprobs])
    exact, eight_bits, by_channel = said
    assert 0 < mean_difference(exact, by_channel) < 6 * mean_difference(exact, eight_bits)


def test_a_plan_counts_rounded_keys_and_whole_ones(folder: Path) -> None:
    model = ModelConfig(path=str(folder))
    asked = plan_input(EngineConfig(cache=CacheConfig(**CACHE)), model, device="cpu", available_bytes=GIB)
    spec, types = asked.spec, asked.kv_dtypes
    shapes = [shape for layer in range(spec.num_layers) if (shape := spec.cache_shape(layer)) is not None]
    # Codes of key and value, a scale of the value, two numbers for each channel of a block.
    each = sum(shape.num_heads * (32 // 2 + 32 // 2 + 4 + 2 * 2 * 32 // KEY_GROUP) for shape in shapes)
    assert kv_bytes_per_token(spec, types) == each
    runner, plan, _ = build_here(asked.config, model, lambda phase, part: None)
    with closing(runner):  # type: ignore[type-var]
        layers = runner.storage.layers  # type: ignore[attr-defined]
        blocks = sum(part[0].nbytes for layer in layers for part in layer.tensors())
        assert plan.kv_bytes_per_token * KEY_GROUP == blocks
        whole = sum(np.asarray(layer.recent)[:2].nbytes for layer in layers)
    assert recent_bytes(spec, types, 3) == 3 * whole
    few = EngineConfig(cache=CacheConfig(**CACHE), max_model_len=256)
    plans = [
        make_plan(plan_input(replace_seqs(few, count), model, device="cpu", available_bytes=GIB))
        for count in (8, 64)
    ]
    assert plans[1].workspace_bytes - plans[0].workspace_bytes >= 56 * whole


def test_a_plan_for_gpus_counts_newest_keys_of_all_slots(folder: Path) -> None:
    """There, what is not written takes memory as well."""
    model = ModelConfig(path=str(folder))
    config = EngineConfig(cache=CacheConfig(**CACHE), max_model_len=256)
    workspaces = []
    for count in (8, 64):
        given = plan_input(replace_seqs(config, count), model, device="cuda", available_bytes=GIB)
        workspaces.append(make_plan(given).workspace_bytes)
    spec, types = given.spec, given.kv_dtypes
    assert workspaces[1] - workspaces[0] >= recent_bytes(spec, types, 2 * 56)


def replace_seqs(config: EngineConfig, count: int) -> EngineConfig:
    scheduler = msgspec.structs.replace(config.scheduler, max_num_seqs=count)
    return msgspec.structs.replace(config, scheduler=scheduler)


@pytest.mark.parametrize(
    ("case", "options", "words"),
    [
        ("llama", {"cache": {"block_size": 16}}, "cache.block_size: .* set it to 64"),
        (
            "llama",
            {"speculation": {"method": "ngram", "num_draft_tokens": 65}},
            "speculation.num_draft_tokens = 65: .* set it to 64 at most",
        ),
        ("odd", {}, "cache.kv_dtype = 'kivi4' .* heads of 24 elements are no multiple of 16"),
        ("latent", {}, "cache.kv_dtype = 'kivi4' .* latent vectors"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(
    case: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    model_type, changes = {
        "llama": ("llama", {"head_dim": 16}),
        "odd": ("llama", {"head_dim": 24}),
        "latent": ("deepseek_v3", LATENT_SIZES),
    }[case]
    make_checkpoint(tmp_path, model_type, **changes)
    given = options | {"cache": CACHE | options.get("cache", {})}
    config = msgspec.convert(given, EngineConfig)
    with pytest.raises(ConfigError, match=rf"engine\.{words}"):
        make_plan(plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB))
