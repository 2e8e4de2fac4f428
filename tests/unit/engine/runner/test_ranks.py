"""Ranks that share a model: the tokens of one process, the same bits every time, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import llguidance
import psutil
import pytest
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ParallelConfig, SpeculationConfig
from engine.model.native_decoder import NativeDecoder
from engine.model.spec import CheckpointError
from engine.runner.base import RunnerBroken
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import GrammarSpec, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import Driver, Job, new_sequence, open_runner, prompt_of

BUNDLED = Path("models/millrace-nano")
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
# Where a sum over inputs is cut, its terms are added in another order: float32 differs in its last bits, and
# what is rounded to bfloat16 behind it now and then in one of eight.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 0.08
LENGTHS = (1, 5, 40, 100, 3)

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


@pytest.fixture(autouse=True)
def _nobody_stays() -> Iterator[None]:
    """Ranks end with their runner; what they share has no name and goes with them."""
    before = set(os.listdir("/dev/shm"))
    yield
    gc.collect()
    assert not [each for each in psutil.Process().children() if _is_rank(each)]
    assert set(os.listdir("/dev/shm")) <= before
    assert not [link for link in _open_files() if "millrace-ranks" in link]


def _is_rank(process: psutil.Process) -> bool:
    return "engine.runner.ranks.worker" in process.cmdline()


def _open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            continue
    return found


def shared(folder: Path, size: int = 2, **options: Any) -> ModelRunner:
    """A runner of so many ranks, of a thread each unless they are asked for more."""
    options = {"num_threads": size, "parallel": ParallelConfig(tensor=size)} | options
    return open_runner(folder, native="required", **options)


def answers(runner: ModelRunner, vocab_size: int = 199, num_tokens: int = 16) -> list[Job]:
    """Greedy answers to prompts of many lengths, together and in chunks."""
    jobs = [
        Job(prompt_of(length, vocab_size, seed=length), num_tokens=num_tokens, sampling=GREEDY, chunk=29)
        for length in LENGTHS
    ]
    with closing(runner):
        done = Driver(runner).run(jobs)
    assert [len(job.output) for job in done] == [num_tokens] * len(done), [job.failure for job in done]
    return done


def bits(jobs: list[Job]) -> list[tuple[list[int], list[float]]]:
    return [(job.output, [entry.logprob for entry in job.logprobs]) for job in jobs]


def assert_near(ours: list[Job], theirs: list[Job], tolerance: float) -> None:
    for job, other in zip(ours, theirs, strict=True):
        for entry, expected in zip(job.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=tolerance)
            assert entry.top_logprobs == pytest.approx(expected.top_logprobs, abs=tolerance)


# Shapes, and numbers of ranks: heads of keys and values divided, one for each, and the same on several.
SHAPES = [
    ("llama", 2),
    ("llama", 4),
    ("llama-tied", 2),
    ("llama-biases", 2),
    ("llama-mqa", 2),
    ("mistral-window", 2),
    ("qwen2", 2),
    ("qwen3", 4),
]


@pytest.mark.parametrize(("case", "size"), SHAPES)
def test_ranks_give_the_tokens_of_one_process(case: str, size: int, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)
    runner = shared(tmp_path, size)
    assert isinstance(runner.model, NativeDecoder)
    # A rank holds its heads' keys and values alone.
    kv_heads = max(1, changes.get("num_key_value_heads", 2) // size)
    assert {layer.keys.shape[1] for layer in runner.storage.layers} == {kv_heads}
    ours, theirs = answers(runner), answers(open_runner(tmp_path, native="required"))
    assert [job.output for job in ours] == [job.output for job in theirs]
    assert_near(ours, theirs, FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"dtype": "bfloat16"}, BFLOAT16_TOLERANCE),
        ({"quantize": "int8"}, BFLOAT16_TOLERANCE),
        # Groups of levels begin anew with each part of the inputs.
        ({"quantize": "int4"}, 0.3),
        ({"cache": {"kv_dtype": "int8"}}, BFLOAT16_TOLERANCE),
    ],
    ids=["bfloat16", "int8", "int4", "kv-int8"],
)
def test_rounded_numbers_are_near_those_of_one_process(options: dict[str, Any], tolerance: float) -> None:
    ours = answers(shared(BUNDLED, **options), 2048, num_tokens=1)
    theirs = answers(open_runner(BUNDLED, native="required", **options), 2048, num_tokens=1)
    assert_near(ours, theirs, tolerance)


def test_the_bundled_model_says_the_same_for_long() -> None:
    ours = answers(shared(BUNDLED), 2048, num_tokens=64)
    theirs = answers(open_runner(BUNDLED, native="required"), 2048, num_tokens=64)
    assert [job.output for job in ours] == [job.output for job in theirs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_the_batch_nor_on_threads(dtype: str, tmp_path: Path) -> None:
    """Parts are added from the first rank to the last, whoever is there first."""
    make_checkpoint(tmp_path, "llama")
    together = bits(answers(shared(tmp_path, dtype=dtype)))
    assert bits(answers(shared(tmp_path, dtype=dtype, num_threads=4))) == together
    with closing(shared(tmp_path, dtype=dtype)) as runner:
        for length, expected in zip(LENGTHS, together, strict=True):
            alone = [Job(prompt_of(length, 199, seed=length), num_tokens=16, sampling=GREEDY)]
            assert bits(Driver(runner).run(alone)) == [expected]


def test_prefixes_copies_drafts_and_scores(tmp_path: Path) -> None:
    """Blocks that others computed, blocks that a plan copies, drafts that are looked up, log-probabilities of
    prompts: each as one process has them.
    """
    make_checkpoint(tmp_path, "llama")

    def run(runner: ModelRunner) -> list[object]:
        with closing(runner):
            driver = Driver(runner)
            prompt = prompt_of(32, 199)
            blocks = driver.take_blocks(32)
            spare = driver.take_blocks(16)[0]
            row = (ScheduledSequence(9, 0, 32, (), True),)
            first = driver.step(SchedulerOutput(0, (new_sequence(9, Job(prompt), blocks),), row))
            found: list[object] = [first.results[0].token_ids]
            # Blocks stay as they are when nobody has them any more.
            driver.step(SchedulerOutput(1, released=(9,)))
            ends = [Job([*prompt, *prompt_of(9, 199, seed=seed)], sampling=GREEDY) for seed in (1, 2)]
            hits = driver.run(ends, prefix=(blocks, 32))
            found.append([job.output for job in hits])
            # A copy of the second block is as good as the block itself.
            other = new_sequence(8, Job(prompt), [blocks[0], spare])
            copied = driver.step(
                SchedulerOutput(
                    2,
                    (other,),
                    (ScheduledSequence(8, 31, 1, (), True),),
                    block_copies=((blocks[1], spare),),
                )
            )
            found.append(copied.results[0].token_ids)
            driver.step(SchedulerOutput(3, released=(8,)))
            loops = Job(prompt_of(6, 199) * 4, num_tokens=24, speculate=True)
            scored = Job(prompt_of(200, 199), sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
            driver.run([loops, scored])
            assert loops.num_drafted
            assert len(scored.prompt_logprobs) == 199
            found += [loops.output, scored.output, [entry.top_ids[0] for entry in scored.prompt_logprobs]]
            return found

    drafts = {"speculation": SpeculationConfig(method="ngram", min_acceptance=0.0)}
    assert run(shared(tmp_path, **drafts)) == run(open_runner(tmp_path, native="required", **drafts))


def test_guided_answers_are_those_of_one_process() -> None:
    grammar = GrammarSpec(
        digest="", payload=llguidance.grammar_from("regex", "[a-z]{3,40}").encode(), backend="llguidance/1"
    )
    seeded = SamplingParams(temperature=0.8, seed=7, top_p=0.9)
    asked = [(GREEDY, grammar), (seeded, grammar), (seeded, None)]

    def run(runner: ModelRunner) -> list[list[int]]:
        jobs = [Job(prompt_of(20, 2048), num_tokens=30, sampling=each, grammar=by) for each, by in asked]
        with closing(runner):
            return [job.output for job in Driver(runner).run(jobs)]

    assert run(shared(BUNDLED)) == run(open_runner(BUNDLED, native="required"))


@pytest.mark.parametrize("overlap", ["auto", "on"])
def test_a_killed_rank_breaks_the_runner(overlap: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    lost: list[str] = []
    config = EngineConfig(native="required", num_threads=2, parallel=ParallelConfig(tensor=2))
    runner, _, _ = build_here(
        config, ModelConfig(path=str(tmp_path)), lambda stage, part: None, on_lost=lost.append
    )
    with closing(runner):
        (rank,) = [each for each in psutil.Process().children() if _is_rank(each)]
        rank.send_signal(signal.SIGKILL)
        driver = Driver(runner)
        with pytest.raises(RunnerBroken):
            driver.run([Job(prompt_of(5, 199), num_tokens=1000)])
    assert lost == ["rank 1 of 2 ended (killed by SIGKILL)"]


def test_what_is_wrong_with_a_ranks_part_arrives(tmp_path: Path) -> None:
    """Numbers that only the second rank reads."""
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][:, -1] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight holds numbers that are not finite"):
        shared(tmp_path)


@pytest.mark.parametrize(
    ("case", "size", "words"),
    [
        ("mixtral", 2, "has experts, which ranks do not share yet; set it to 1"),
        ("deepseek-v3", 2, "experts"),
        ("lfm2", 2, "layers that carry a state"),
        ("phi3", 2, "fused projections"),
        ("olmo2", 2, "norms over all heads"),
        ("gemma2", 2, "a window beside layers without one"),
        ("llama", 3, "does not divide the 4 heads of .*; set it to one of 1, 2, 4"),
        ("llama", 8, "does not divide the 4 heads"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(case: str, size: int, words: str, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)
    with pytest.raises(ConfigError, match=rf"engine\.parallel\.tensor = {size}: .*{words}"):
        shared(tmp_path, size)


def test_more_ranks_than_threads_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"a rank computes on one core at least, and there are 1; lower it"):
        shared(tmp_path, num_threads=1)
